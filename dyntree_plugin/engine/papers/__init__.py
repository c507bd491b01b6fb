"""The growths and rules of papers in an engine: a walk, a growth, and chains."""
