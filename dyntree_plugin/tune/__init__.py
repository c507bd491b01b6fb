"""Fit drafts to their target: the computations of ``dyntree tune``, without an engine."""
