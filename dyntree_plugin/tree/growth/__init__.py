"""Ways to grow a tree, one file each."""
