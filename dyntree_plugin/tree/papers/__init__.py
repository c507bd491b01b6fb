"""Growths and verification rules of the papers, for comparison with those that serve."""
