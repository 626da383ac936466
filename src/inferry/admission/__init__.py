"""Admission: authentication, quotas, budgets and queue limits. Pure: time is an argument."""
