"""Serve loads of requests with engines in processes of their own, for `bench` and `tune`."""
