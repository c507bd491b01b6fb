"""``dyntree tune``: fit a draft, a pool of drafts or a head to its target."""
