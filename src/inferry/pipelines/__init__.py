"""Composed models: routes, cascades, ensembles and pipelines, which answer one call with calls of other models."""
