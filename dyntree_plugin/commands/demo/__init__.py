"""`dyntree demo`: complete the same prompts without and with trees."""
