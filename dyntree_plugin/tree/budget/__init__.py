"""How many nodes to verify: the costs, the worth of trees, and the choice."""
