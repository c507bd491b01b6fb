"""Configurations whose rows would depend on other rows are refused with `exactness` bits alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configurations import UNCHECKED, Build, admit, changed, refusal_of, with_all
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dyntree_plugin.admission.same_bits import EXPERTS, ON_CPU, ON_CUDA, REFUSALS, bits_refusals

BITS = {"exactness": "bits"}
CHANGES: dict[str, tuple[str, Any]] = {
    "is_moe, architecture": ("model_config.architecture", "MixtralForCausalLM"),
    "is_moe, enforce_eager": ("model_config.enforce_eager", False),
    "is_moe, data_parallel_size": ("parallel_config.data_parallel_size", 2),
    "is_hybrid": ("model_config.is_hybrid", True),
    "index_topk": ("model_config.hf_text_config.index_topk", 8),
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


@pytest.fixture
def batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("batch_invariant")
def test_dense_models_are_admitted(build: Build, dtype: str, device: str) -> None:
    assert not [*bits_refusals(build(dtype=dtype, dyntree=BITS), device)]
    if device == "cpu":
        admit(changed(build(dtype=dtype, dyntree=BITS), *UNCHECKED), **BITS)


EVERY = [
    *(("cpu", each) for each in (*REFUSALS, *ON_CPU)),
    *(("cuda", each) for each in (*REFUSALS, *ON_CUDA)),
]


def with_experts(build: Build, **changes: Any) -> Any:
    served = {
        "model_config.is_moe": True,
        "model_config.architecture": EXPERTS[0],
        "model_config.enforce_eager": True,
    }
    return with_all(build(dyntree=BITS), served | changes)


@pytest.mark.parametrize(
    ("device", "refusal"), EVERY, ids=lambda each: each if isinstance(each, str) else each.option
)
@pytest.mark.usefixtures("batch_invariant")
def test_one_change_is_refused_with_its_option_and_advice(
    build: Build, refusal: Any, device: str
) -> None:
    (option,) = (name for name in CHANGES if refusal.option == f"dyntree.exactness, {name}")
    name, value = CHANGES[option]
    dense = changed(build(dyntree=BITS), name, value)
    config = with_experts(build, **{name: value}) if "is_moe, " in option else dense
    (reason,) = bits_refusals(config, device)
    assert reason.startswith(f"dyntree.exactness, {option}=(")
    assert refusal.advice in reason


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.usefixtures("batch_invariant")
def test_experts_and_latent_attention_are_admitted(build: Build, name: str) -> None:
    for latent in (True, False):
        changes = {"model_config.architecture": name, "model_config.use_mla": latent}
        found = with_experts(build, **changes)
        assert not [*bits_refusals(found, "cpu"), *bits_refusals(found, "cuda")]


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.usefixtures("batch_invariant")
def test_on_cuda_attention_is_that_of_triton(build: Build, latent: bool) -> None:
    backends = ("FLASHMLA", "TRITON_MLA") if latent else ("FLASH_ATTN", "TRITON_ATTN")
    for backend in backends:
        changes = {"attention_config.backend": AttentionBackendEnum[backend]}
        named = with_all(build(dyntree=BITS), changes | {"model_config.use_mla": latent})
        reasons = [*bits_refusals(named, "cuda")]
        assert bool(reasons) == (backend == backends[0])
        assert all(f"attention_backend={backend!r} is not supported" in each for each in reasons)
        assert not [*bits_refusals(named, "cpu")]


def test_on_cuda_vllms_batch_invariant_mode_is_needed(build: Build) -> None:
    config = changed(build(dyntree=BITS), *UNCHECKED)
    assert "set VLLM_BATCH_INVARIANT=1 in the environment" in refusal_of(config, "cuda", **BITS)
    assert "bits" not in refusal_of(changed(config, "model_config.is_hybrid", True), "cuda")
