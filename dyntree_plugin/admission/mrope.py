"""What cannot be combined with trees if the target's positions have several components (M-RoPE)."""

from __future__ import annotations

from typing import Any

from dyntree_plugin.admission.refusals import Refusal

TARGETS = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""Architectures whose tokens were compared with those of engines without speculation."""


def _target(config: Any) -> tuple[bool, str]:
    model = config.model_config
    return model.uses_mrope, model.architecture if model.uses_mrope else ""


def _ranks(config: Any) -> tuple[bool, int, int]:
    parallel = config.parallel_config
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return config.model_config.uses_mrope, *sizes


MROPE_REFUSALS = (
    Refusal(
        "uses_mrope, architecture",
        _target,
        lambda found: found[0] and found[1] not in TARGETS,
        f"with M-RoPE trees were compared on {' and '.join(TARGETS)} alone; use one of these",
    ),
    Refusal(
        "uses_mrope, tensor_parallel_size, pipeline_parallel_size",
        _ranks,
        lambda found: found[0] and max(found[1:]) > 1,
        "with M-RoPE trees were compared on one rank alone; set both to 1",
    ),
    Refusal(
        "uses_mrope, enable_lora",
        lambda c: (c.model_config.uses_mrope, c.lora_config is not None),
        all,
        "with M-RoPE trees were not compared with adapters; leave --enable-lora out",
    ),
)
"""Checks of ``VllmConfig``."""
