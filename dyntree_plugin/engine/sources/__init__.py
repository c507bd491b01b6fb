"""Sources of nodes: draft models, heads, and look-up."""
