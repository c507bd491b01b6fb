"""What cannot be combined with `exactness` bits: a row would depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission.refusals import Refusal, dtype_of, kv_cache_dtype
from dyntree_plugin.options.options import NAMESPACE

_DENSE = "use a dense model"
_NOT_COMPARED = "not compared bit by bit yet; "


def _above_one(value: int) -> bool:
    return value > 1


ON_CPU = (
    Refusal(
        "is_moe",
        lambda c: c.model_config.is_moe,
        bool,
        f"an expert's products have the rows that chose it; {_DENSE}",
    ),
    Refusal(
        "is_hybrid",
        lambda c: c.model_config.is_hybrid,
        bool,
        f"recurrent layers sum the rows of a prompt in another order than single ones; {_DENSE}",
    ),
    Refusal(
        "use_mla",
        lambda c: c.model_config.use_mla,
        bool,
        "latent attention sums in the order of a tree's rows; use multi-head attention",
    ),
    Refusal(
        "quantization",
        lambda c: c.model_config.quantization,
        bool,
        f"{_NOT_COMPARED}use a checkpoint in bfloat16 or float32",
    ),
    Refusal(
        "dtype",
        lambda c: dtype_of(c.model_config),
        lambda dtype: dtype == "float16",
        f"{_NOT_COMPARED}set --dtype to bfloat16 or float32",
    ),
    Refusal(
        "kv_cache_dtype",
        kv_cache_dtype,
        lambda dtype: dtype in KV_CACHE_DTYPES,
        f"{_NOT_COMPARED}set it to the model's type",
    ),
    Refusal(
        "supports_multimodal_inputs",
        lambda c: c.model_config.supports_multimodal_inputs,
        bool,
        f"{_NOT_COMPARED}for text alone use --language-model-only",
    ),
    Refusal(
        "uses_mrope",
        lambda c: c.model_config.uses_mrope,
        bool,
        f"positions of several components were {_NOT_COMPARED}use another model",
    ),
    Refusal(
        "tensor_parallel_size",
        lambda c: c.parallel_config.tensor_parallel_size,
        _above_one,
        f"{_NOT_COMPARED}set it to 1",
    ),
    Refusal(
        "pipeline_parallel_size",
        lambda c: c.parallel_config.pipeline_parallel_size,
        _above_one,
        f"{_NOT_COMPARED}set it to 1",
    ),
    Refusal(
        "enable_lora", lambda c: c.lora_config is not None, bool, f"{_NOT_COMPARED}leave it out"
    ),
    Refusal(
        "kv_transfer_config",
        lambda c: c.kv_transfer_config is not None,
        bool,
        "keys and values would come from where their bits are not known; leave it out",
    ),
)
"""Checks of ``VllmConfig``. They name what is admitted with other `exactness`."""


def bits_refusals(vllm_config: Any, device_type: str) -> Iterator[str]:
    """Yield why the bits of a configuration's output would depend on drafts and batches."""
    option = f"{NAMESPACE}.exactness='bits'"
    if device_type != "cpu":
        yield (
            f"{option} is not supported on {device_type} yet: products and attention there sum in "
            "an order that depends on the rows of a step; use tokens, or a CPU"
        )
        return
    found = (refusal(vllm_config, f"with {option} ") for refusal in ON_CPU)
    yield from filter(None, found)
