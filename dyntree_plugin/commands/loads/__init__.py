"""Serve loads of requests with engines in separate processes, for `bench` and `tune`."""
