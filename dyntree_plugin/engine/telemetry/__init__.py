"""Counts of steps, on their way from the worker to Prometheus."""
