"""What cannot be combined with trees if the target's positions have several components (M-RoPE)."""

from __future__ import annotations

from dyntree_plugin.admission.uncompared import Targets

TARGETS = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
)
"""Architectures whose tokens were compared with those of engines without speculation."""

MROPE_REFUSALS = (Targets("uses_mrope", lambda m: m.uses_mrope).other_than(TARGETS),)
"""Checks of ``VllmConfig``."""
