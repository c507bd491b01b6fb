"""Targets with multi-head latent attention: what is admitted with them, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import ON_CUDA, admit, changed, refusal_of, with_all

from dyntree_plugin.engine import configuration

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TARGET = ("model_config.use_mla", "speculative_config.target_model_config.use_mla")
DRAFT = "speculative_config.draft_model_config.use_mla"


@pytest.fixture
def latent(admitted: VllmConfig) -> VllmConfig:
    """Return a configuration whose target and draft have latent attention."""
    return with_all(admitted, dict.fromkeys((*TARGET, DRAFT), True))


def in_half(latent: VllmConfig) -> VllmConfig:
    """Return the configuration for another device, in a type that CUDA serves."""
    return with_all(latent, {"model_config.dtype": torch.bfloat16, **ON_CUDA})


def test_latent_attention_is_admitted_in_targets_and_their_drafts(latent: VllmConfig) -> None:
    admit(latent)
    assert re.search(r"use_mla, dtype=\(True, 'float32'\) .* bfloat16", refusal_of(latent, "cuda"))
    admit(in_half(latent), "cuda")


def test_on_cuda_some_backends_are_admitted_and_others_refused(latent: VllmConfig) -> None:
    for option in ("attention_config.backend", "speculative_config.attention_backend"):
        for name in ("FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"):
            named = changed(in_half(latent), option, SimpleNamespace(name=name))
            admit(named, "cuda")
        other = changed(in_half(latent), option, SimpleNamespace(name="CUTLASS_MLA"))
        reason = refusal_of(other, "cuda")
        assert re.search("attention_backend='CUTLASS_MLA' .* TRITON_MLA", reason)


@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3"])
def test_quantised_caches_are_admitted_on_cuda_where_the_backend_reads_them(
    latent: VllmConfig, cache: str
) -> None:
    reason = refusal_of(changed(latent, "cache_config.cache_dtype", cache))
    assert f"use_mla, kv_cache_dtype=(True, '{cache}') is not supported" in reason
    quantised = changed(in_half(latent), "cache_config.cache_dtype", cache)
    admit(quantised, "cuda")
    for option in ("attention_config.backend", "speculative_config.attention_backend"):
        for name in ("FLASHMLA", "TRITON_MLA"):
            named = changed(quantised, option, SimpleNamespace(name=name))
            admit(named, "cuda")
        other = changed(quantised, option, SimpleNamespace(name="FLASH_ATTN_MLA"))
        assert re.search(r"'FLASH_ATTN_MLA' .* over quantised caches", refusal_of(other, "cuda"))


@pytest.mark.parametrize("cache", ["fp8_ds_mla", "fp8_e5m2"])
def test_other_quantised_caches_are_refused(latent: VllmConfig, cache: str) -> None:
    other = changed(in_half(latent), "cache_config.cache_dtype", cache)
    assert re.search(f"kv_cache_dtype .*{cache}.* is not supported", refusal_of(other, "cuda"))


def test_a_draft_with_other_attention_than_its_target_is_refused(latent: VllmConfig) -> None:
    reason = refusal_of(changed(latent, DRAFT, False))
    assert "use_mla (target, draft)=(True, False) is not supported" in reason


def test_heads_of_mistrals_class_are_refused(latent: VllmConfig) -> None:
    """When vLLM loads weights, its class lacks ``is_fused_shared_expert_enabled``."""
    admit(changed(latent, "speculative_config.method", "eagle"))
    path, name = "speculative_config.draft_model_config.architecture", "EagleMistralLarge3"
    assert f"{name}ForCausalLM' is not" in refusal_of(changed(latent, path, f"{name}ForCausalLM"))


def test_an_indexer_is_refused_on_a_cpu(latent: VllmConfig) -> None:
    sparse = changed(latent, "model_config.hf_text_config.index_topk", 2048)
    assert "use_mla, index_topk=(True, 2048) is not supported" in refusal_of(sparse)


def test_vectors_of_other_sizes_are_refused_on_a_cpu(latent: VllmConfig) -> None:
    path = "model_config.hf_text_config"
    sized = with_all(latent, {f"{path}.kv_lora_rank": 256, f"{path}.qk_rope_head_dim": 64})
    assert "use_mla, kv_lora_rank, qk_rope_head_dim=(True, (256, 64))" in refusal_of(sized)
    admit(changed(sized, f"{path}.kv_lora_rank", 512))
    admit(in_half(sized), "cuda")


def test_adapters_are_admitted(latent: VllmConfig) -> None:
    adapted = changed(latent, "lora_config", object())
    admit(adapted)
    admit(in_half(adapted), "cuda")


def sparse(latent: VllmConfig, *changes: tuple[str, Any]) -> VllmConfig:
    """Return the configuration of a target with an indexer, drafted by look-up, on CUDA."""
    of_target = {
        "model_config.hf_text_config.index_topk": 2048,
        "model_config.architecture": "DeepseekV32ForCausalLM",
        "speculative_config.method": "ngram_gpu",
    }
    return with_all(in_half(latent), {**of_target, **dict(changes)})


def test_an_indexer_is_admitted_on_cuda_with_look_up_and_the_targets_module(
    latent: VllmConfig,
) -> None:
    admit(sparse(latent), "cuda")
    named = ("attention_config.backend", SimpleNamespace(name="FLASHMLA_SPARSE"))
    admit(sparse(latent, named), "cuda")
    for path in ("model_config", "speculative_config.target_model_config"):
        latent = changed(latent, f"{path}.hf_text_config.index_topk", 2048)
    draft = "speculative_config.draft_model_config"
    module = with_all(sparse(latent), {
        "speculative_config.method": "mtp", f"{draft}.architecture": "DeepseekV32MTPModel",
        f"{draft}.hf_text_config.index_topk": 2048,
    })  # fmt: skip
    admit(module, "cuda")
    admit(changed(module, "cache_config.cache_dtype", "fp8"), "cuda")
    other = changed(module, f"{draft}.architecture", "HYV4MTPModel")
    named = r"index_topk \(target, draft\), architecture \(draft\)=\(\(2048, 2048\), 'HYV4MTPModel"
    assert re.search(named, refusal_of(other, "cuda"))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("model_config.architecture", "HYV4ForCausalLM", "architecture"),
        ("model_config.dtype", torch.float16, "dtype"),
        ("cache_config.cache_dtype", "fp8_ds_mla", "kv_cache_dtype"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size"),
        ("kv_transfer_config", SimpleNamespace(kv_connector=None), "kv_transfer_config"),
        ("lora_config", object(), "enable_lora"),
        ("attention_config.indexer_kv_dtype", "mxfp4", "attention_config.indexer_kv_dtype"),
        ("attention_config.hisparse_config", object(), "attention_config.hisparse_config"),
        ("attention_config.backend", SimpleNamespace(name="FLASHINFER_MLA_SPARSE_SM120"),
         "SM120' .* on FLASHMLA_SPARSE, FLASH_ATTN_MLA_SPARSE and FLASHINFER_MLA_SPARSE; leave"),
    ],
)  # fmt: skip
def test_what_was_not_compared_with_an_indexer_is_refused(
    latent: VllmConfig, path: str, value: Any, named: str
) -> None:
    assert re.search(named, refusal_of(sparse(latent, (path, value)), "cuda"))


@pytest.mark.parametrize(("in_chunks", "scheduled"), [(True, 48), (False, 2048)])
def test_a_prompt_that_is_read_whole_has_room_in_a_step(
    admitted: VllmConfig, in_chunks: bool, scheduled: int
) -> None:
    """vLLM raises the tokens of a batch for latent attention on a CPU, after those of a step."""
    sizes = {
        "scheduler_config.enable_chunked_prefill": in_chunks,
        "scheduler_config.max_num_batched_tokens": 2048,
        "scheduler_config.max_num_scheduled_tokens": 48,
    }
    config = with_all(admitted, sizes)
    configuration.choose_scheduler(config)
    assert config.scheduler_config.max_num_scheduled_tokens == scheduled
