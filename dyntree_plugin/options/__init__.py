"""The options of trees: read, checked, and resolved to a plan."""
