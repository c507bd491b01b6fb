"""Ways to verify a tree, one file each."""
