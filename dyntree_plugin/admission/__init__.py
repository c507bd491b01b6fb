"""Decide what is served and what is refused, before any weights load."""
