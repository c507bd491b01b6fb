"""`dyntree demo`: the same prompts without and with a tree, in one run."""
