"""What cannot be combined with trees if tokens of an image see each other both ways."""

from __future__ import annotations

from dyntree_plugin.admission.uncompared import Targets

_GEMMA4 = Targets(
    "Gemma-4's is_mm_prefix_lm", lambda m: m.is_mm_prefix_lm and m.architecture.startswith("Gemma4")
)

IMAGE_REFUSALS = (*_GEMMA4.uncompared("pipeline_parallel_size"),)
"""Checks of ``VllmConfig``."""
