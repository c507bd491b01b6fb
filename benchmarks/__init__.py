"""Measurements that run from a clone of the repository."""
