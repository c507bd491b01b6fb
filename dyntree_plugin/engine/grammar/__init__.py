"""Grammars of structured output on trees: in the scheduler and in the worker."""
