"""What cannot be combined with `exactness` bits: a row would depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dyntree_plugin.admission.uncompared import Targets
from dyntree_plugin.options.options import NAMESPACE

_OPTION = f"{NAMESPACE}.exactness"
_BITS = Targets(_OPTION, lambda _: "bits")

ON_CPU = (
    _BITS.refusal(
        "is_moe",
        lambda c: c.model_config.is_moe,
        bool,
        "an expert's products have the rows that chose it; use a dense model",
    ),
    _BITS.refusal(
        "is_hybrid",
        lambda c: c.model_config.is_hybrid,
        bool,
        "recurrent layers sum the rows of a prompt in another order than single ones; use a dense "
        "model",
    ),
    _BITS.refusal(
        "use_mla",
        lambda c: c.model_config.use_mla,
        bool,
        "latent attention sums in the order of a tree's rows; use multi-head attention",
    ),
    *_BITS.uncompared(
        "quantization",
        "dtype",
        "kv_cache_dtype",
        "supports_multimodal_inputs",
        "uses_mrope",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "enable_lora",
        "kv_transfer_config",
    ),
)
"""Checks of ``VllmConfig``. They name what is admitted with other `exactness`."""


def bits_refusals(vllm_config: Any, device_type: str) -> Iterator[str]:
    """Yield why the bits of a configuration's output would depend on drafts and batches."""
    if device_type == "cpu":
        yield from filter(None, (refusal(vllm_config) for refusal in ON_CPU))
        return
    yield (
        f"{_OPTION}='bits' is not supported on {device_type} yet: products and attention there "
        "sum in an order that depends on the rows of a step; use tokens, or a CPU"
    )
