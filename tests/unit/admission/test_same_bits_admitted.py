"""Configurations whose rows would depend on other rows are refused with `exactness` bits alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configurations import UNCHECKED, Build, admit, changed, refusal_of

from dyntree_plugin.admission.same_bits import ON_CPU, bits_refusals

BITS = {"exactness": "bits"}
CHANGES: dict[str, tuple[str, Any]] = {
    "is_moe": ("model_config.is_moe", True),
    "is_hybrid": ("model_config.is_hybrid", True),
    "use_mla": ("model_config.use_mla", True),
    "quantization": ("model_config.quantization", "fp8"),
    "dtype": ("model_config.dtype", torch.float16),
    "kv_cache_dtype": ("cache_config.cache_dtype", "fp8_e4m3"),
    "supports_multimodal_inputs": ("model_config.supports_multimodal_inputs", True),
    "uses_mrope": ("model_config.uses_mrope", True),
    "tensor_parallel_size": ("parallel_config.tensor_parallel_size", 2),
    "pipeline_parallel_size": ("parallel_config.pipeline_parallel_size", 2),
    "enable_lora": ("lora_config", SimpleNamespace()),
    "kv_transfer_config": ("kv_transfer_config", SimpleNamespace()),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_models_are_admitted_on_a_cpu(build: Build, dtype: str) -> None:
    admit(changed(build(dtype=dtype, dyntree=BITS), *UNCHECKED), **BITS)


@pytest.mark.parametrize("refusal", ON_CPU, ids=lambda refusal: refusal.option)
def test_one_change_is_refused_with_its_option_and_advice(build: Build, refusal: Any) -> None:
    (option,) = (name for name in CHANGES if refusal.option == f"dyntree.exactness, {name}")
    (reason,) = bits_refusals(changed(build(dyntree=BITS), *CHANGES[option]), "cpu")
    assert reason.startswith(f"dyntree.exactness, {option}=('bits', ")
    assert refusal.advice in reason


def test_other_devices_are_refused(build: Build) -> None:
    config = changed(build(dyntree=BITS), *UNCHECKED)
    assert "exactness='bits' is not supported on cuda" in refusal_of(config, "cuda", **BITS)
    assert "bits" not in refusal_of(changed(config, "model_config.is_moe", True), "cuda")
