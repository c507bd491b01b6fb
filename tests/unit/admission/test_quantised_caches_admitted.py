"""Quantised KV caches: what is admitted with them, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import admit, changed, refusal_of
from vllm.config import KVTransferConfig
from vllm.config.lora import LoRAConfig

from dyntree_plugin.engine.attention import served
from dyntree_plugin.engine.configuration import WORKERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NIXL = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}


@pytest.fixture(params=["fp8", "fp8_e4m3", "of the checkpoint"])
def quantised(admitted: VllmConfig, request: pytest.FixtureRequest) -> VllmConfig:
    if request.param == "of the checkpoint":
        return changed(admitted, "model_config.hf_config.quantization_config", SCHEME)
    return changed(admitted, "cache_config.cache_dtype", request.param)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_in_e4m3_is_admitted(quantised: VllmConfig, device: str) -> None:
    worker = changed(quantised, "parallel_config.worker_cls", WORKERS[device])
    admit(worker, device)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", torch.float16),
        ("lora_config", LoRAConfig()),
        ("kv_transfer_config", NIXL),
        ("speculative_config.use_gemma4_mtp", lambda: True),
    ],
)
def test_it_is_admitted_with_other_options(quantised: VllmConfig, path: str, value: Any) -> None:
    admit(changed(quantised, path, value))


def test_what_was_not_compared_is_refused(quantised: VllmConfig) -> None:
    latent = changed(quantised, "model_config.use_mla", True)
    assert "use_mla, kv_cache_dtype=" in refusal_of(latent)


def test_a_cache_that_vllm_cannot_quantise_here_is_refused(
    quantised: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    reason = refusal_of(quantised, "cpu", served.refusal)
    assert re.search("kv_cache_dtype='fp8.* requires x86 with AVX-512", reason)
