"""Bring counts of steps from the worker to Prometheus."""
