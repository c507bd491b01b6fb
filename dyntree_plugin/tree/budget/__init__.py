"""The number of nodes to verify: what rows cost, what trees are worth, and the choice."""
