"""Refuse weights with which vLLM quantises the inputs of a layer by one scale of the whole batch.

Rejected nodes would change that scale, and so the rows that are accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from dyntree_plugin.admission import versions
from dyntree_plugin.admission.refusals import Refusal

_ONLINE = "fp8_per_tensor"


def _of_experts(config: Any) -> str | None:
    """Return the name of weights whose experts share a scale; None if those of the target do not.

    Marlin quantises weights alone. In layers without experts, CUTLASS quantises row by row.
    """
    model = config.model_config
    if not model.is_moe or config.kernel_config.moe_backend == "marlin" or _batch_invariant():
        return None
    written = model.model_arch_config.quantization_config or {}
    online = model.quantization_config
    dynamic = written.get("activation_scheme") == "dynamic" and not written.get("weight_block_size")
    if model.quantization == "fp8" and dynamic and written.get("store_dtype") != "mxfp4":
        return "fp8"
    given = () if online is None else (str(online.moe), *(online.targets or {}).values())
    return _ONLINE if {_ONLINE, f"{_ONLINE}_static"} & {*given} else None


def _batch_invariant() -> bool:
    asked = os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"
    return asked and versions.scales_rows_of_experts()


def _inputs(written: Any) -> Iterator[Any]:
    """Yield how Quark quantises the inputs of layers, anywhere in a model's file."""
    if isinstance(written, dict):
        found = written.get("input_tensors")
        yield from found if isinstance(found, list) else [found or {}]
        written = written.values()
    elif not isinstance(written, list):
        return
    for each in written:
        yield from _inputs(each)


def _of_layers(config: Any) -> str | None:
    """Return the name of weights, all of whose layers share scales; None if the target's do not."""
    written = config.model_config.model_arch_config.quantization_config
    quark = any(
        each.get("is_dynamic") and each.get("qscheme") == "per_tensor" for each in _inputs(written)
    )
    torchao = all(word in str(written) for word in ("DynamicActivation", "PerTensor"))
    name: str | None = config.model_config.quantization
    return name if {"quark": quark, "torchao": torchao}.get(name or "") else None


_WHY = (
    "vLLM would quantise their inputs by one scale of all rows of a batch, so rejected nodes would "
    "change tokens; use a checkpoint with scales of blocks or tokens"
)

BATCH_SCALE_REFUSALS = (
    Refusal(
        "quantization of experts",
        _of_experts,
        bool,
        f"{_WHY} (of one that is not quantised, --quantization "
        "fp8_per_block), --moe-backend marlin, or with vLLM 0.33 VLLM_BATCH_INVARIANT=1",
    ),
    Refusal("quantization of layers", _of_layers, bool, _WHY),
)
"""Checks of ``VllmConfig``."""
