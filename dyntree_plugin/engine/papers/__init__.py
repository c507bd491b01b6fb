"""The growths and rules of papers in an engine."""
