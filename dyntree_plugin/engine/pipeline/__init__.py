"""Pipeline parallelism: the last stage drafts and verifies, the earlier ones follow its trees."""
