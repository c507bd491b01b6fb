"""Attention backends for batches of requests with and without trees."""
