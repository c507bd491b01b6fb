"""Fit drafts to their target: what the stages of ``dyntree tune`` compute, without an engine."""
