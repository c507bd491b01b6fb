"""What each platform serves: attention backends, head sizes, types and cache layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from configurations import ON_CUDA, Build, admit, changed, not_built, refusal_of, with_all
from test_table import read
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils

from dyntree_plugin.admission import attention_kernels
from dyntree_plugin.engine.attention import served

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@pytest.fixture(scope="session")
def on_cuda(admitted: VllmConfig) -> VllmConfig:
    """The same configuration, before it is checked on CUDA."""
    return with_all(admitted, ON_CUDA)


def test_a_head_size_without_a_kernel_is_refused_before_weights_load(
    build: Build, model_folder: Callable[..., str]
) -> None:
    odd = model_folder("odd", head_dim=24)
    for model in ({"model": odd}, {"speculative": {"model": odd}}):
        which = "target" if "model" in model else "draft"
        with pytest.raises(ValueError, match=f"{which} model: head_size=24, .*no multiple of 16"):
            build(**model)


@pytest.mark.parametrize(("isa", "served_here"), [("amx", True), ("vec16", True), ("neon", False)])
def test_a_cpu_whose_cache_the_kernels_do_not_read_is_refused_before_weights_load(
    build: Build, monkeypatch: pytest.MonkeyPatch, isa: str, served_here: bool
) -> None:
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: isa)
    if served_here:
        build()
        return
    said = not_built(build)
    assert re.search(r"'neon', but trees need one of .*use an x86 CPU", said)
    assert "target model: head_size=32, dtype=float32 is not supported" in said
    assert "draft model: " in said


@pytest.mark.parametrize(
    ("capability", "head_size", "reason"),
    [
        ((9, 0), 128, None),
        ((8, 0), 512, None),
        ((9, 0), 544, "not supported here: triton: head size 544 is above 512"),
        (
            (7, 5),
            128,
            "dtype=bfloat16 is not supported here: triton: it needs a GPU of capability 8.0",
        ),
    ],
)
def test_on_cuda_the_gpu_and_the_head_size_decide_whether_a_model_is_served(
    admitted: VllmConfig,
    on_cuda: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    head_size: int,
    reason: str | None,
) -> None:
    ask = classmethod(lambda cls: DeviceCapability(*capability))
    monkeypatch.setattr(type(current_platform), "get_device_capability", ask)
    config = changed(on_cuda, "model_config.model_arch_config.head_size", head_size)
    config = changed(config, "model_config.dtype", torch.bfloat16)
    if reason is None:
        admit(config, "cuda", served.refusal)
    else:
        assert reason in refusal_of(config, "cuda", served.refusal)


def test_a_kernel_table_is_read_before_anything_loads(
    admitted: VllmConfig, on_cuda: VllmConfig, tmp_path: Path
) -> None:
    table = tmp_path / "kernels.json"
    options = {"kernel_table": str(table)}
    for content, reason in ((None, "No such file"), ("{}", "must be a result file")):
        if content is not None:
            table.write_text(content)
        refusal = refusal_of(on_cuda, "cuda", **options)
        assert re.search(rf"dyntree\.kernel_table='.*{reason}", refusal)
    table.write_text('{"attention": []}')
    admit(on_cuda, "cuda", **options)
    assert f"kernel_table='{table}' is for CUDA" in refusal_of(admitted, **options)


def test_the_cascade_by_name_is_refused_where_it_cannot_serve(
    on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(config: VllmConfig) -> str:
        return refusal_of(config, "cuda", attention="cascade")

    half = changed(on_cuda, "model_config.dtype", torch.bfloat16)
    assert "needs vLLM's FlashAttention 3 or 4" in refusal(half)  # there is no GPU
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: 3)
    admit(half, "cuda", attention="cascade")
    assert "found version 3, float32" in refusal(changed(half, "model_config.dtype", torch.float32))
    quantised = changed(half, "cache_config.cache_dtype", "fp8")
    assert "cannot be followed with a KV cache in fp8" in refusal(quantised)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "cannot be followed with VLLM_BATCH_INVARIANT=1" in refusal(half)


def test_flashinfer_by_name_is_refused_where_it_cannot_serve(
    admitted: VllmConfig, on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(config: VllmConfig, device: str = "cuda") -> str:
        return refusal_of(config, device, attention="flashinfer")

    assert "attention='flashinfer' is for CUDA" in refusal(admitted, "cpu")
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: None)
    assert "needs FlashInfer: pip install" in refusal(on_cuda)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: name)
    assert re.search("cannot be followed: .*allowed: .*; use triton", refusal(on_cuda))
    quantised = changed(on_cuda, "cache_config.cache_dtype", "fp8")
    assert "cannot be followed with a KV cache in fp8" in refusal(quantised)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "cannot be followed with VLLM_BATCH_INVARIANT=1" in refusal(on_cuda)
    admit(on_cuda, "cuda", attention="triton")


@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3"])
def test_a_cache_that_vllm_cannot_quantise_here_is_refused(
    admitted: VllmConfig, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    quantised = changed(admitted, "cache_config.cache_dtype", cache)
    reason = refusal_of(quantised, "cpu", served.refusal)
    assert re.search("kv_cache_dtype='fp8.* requires x86 with AVX-512", reason)


@pytest.mark.parametrize(
    ("major", "cache", "refused"),
    [(9, "fp8_e4m3", True), (9, "fp8", False), (10, "fp8_e4m3", False), (None, "fp8_e4m3", False)],
)
def test_a_cache_by_a_name_that_flashmla_does_not_read_is_refused_on_hopper(
    admitted: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    major: int | None,
    cache: str,
    refused: bool,
) -> None:
    """Where latent layers have an indexer."""
    capability = major and DeviceCapability(major, 0)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: capability)
    changes, *_ = read(f"latent half indexer cuda cache.cache_dtype={cache}")
    config = with_all(admitted, changes)
    if refused:
        assert "compute capability=(2048, ('fp8_e4m3', 9))" in refusal_of(config, "cuda")
    else:
        admit(config, "cuda")
