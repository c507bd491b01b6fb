"""What cannot be combined with trees if the target's positions have several components (M-RoPE)."""

from __future__ import annotations

from functools import partial

from dyntree_plugin.admission.refusals import dtype_of
from dyntree_plugin.admission.states import given

TARGETS = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
"""Architectures whose tokens were compared with those of engines without speculation."""

_NOT_COMPARED = "not compared yet with decoding without trees"
_with_mrope = partial(given, "uses_mrope")

MROPE_REFUSALS = (
    _with_mrope(
        "architecture",
        lambda c: c.model_config.architecture,
        lambda name: name not in TARGETS,
        f"{_NOT_COMPARED}; use one of {', '.join(TARGETS)}",
    ),
    _with_mrope(
        "dtype",
        lambda c: dtype_of(c.model_config),
        lambda dtype: dtype == "float16",
        f"{_NOT_COMPARED}; set --dtype to bfloat16 or float32",
    ),
    _with_mrope(
        "tensor_parallel_size",
        lambda c: c.parallel_config.tensor_parallel_size,
        lambda ranks: ranks > 1,
        f"{_NOT_COMPARED}; set it to 1",
    ),
    _with_mrope(
        "pipeline_parallel_size",
        lambda c: c.parallel_config.pipeline_parallel_size,
        lambda stages: stages > 1,
        f"{_NOT_COMPARED}; set it to 1",
    ),
    _with_mrope(
        "enable_lora", lambda c: c.lora_config is not None, bool, f"{_NOT_COMPARED}; leave it out"
    ),
)
"""Checks of ``VllmConfig``."""
