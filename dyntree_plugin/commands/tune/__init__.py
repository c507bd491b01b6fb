"""``dyntree tune``: fit a draft or a head to its target."""
