"""One decode step: a file per stage, in the order place, verify, catch up, draft, count."""
