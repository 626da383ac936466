"""Engines on a Ray cluster: Ray Serve places and replaces replicas, the gateway connects to the engine of each."""
