"""What each platform serves: attention backends, head sizes, types and cache layouts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import Build, changed

from dyntree_plugin.admission import attention_kernels, check, cuda_backends
from dyntree_plugin.engine.attention import served
from dyntree_plugin.engine.configuration import WORKERS
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@pytest.fixture(scope="session")
def on_cuda(admitted: VllmConfig) -> VllmConfig:
    """The same configuration, before it is checked on CUDA."""
    with_worker = changed(admitted, "parallel_config.worker_cls", "auto")
    return changed(with_worker, "attention_config.backend", None)


FLEX = SimpleNamespace(name="FLEX_ATTENTION")
"""A vLLM backend that does not support trees."""


@pytest.mark.parametrize(
    ("option", "path", "value"),
    [
        ("attention_backend", "attention_config.backend", FLEX),
        ("backend_per_kind", "attention_config.backend_per_kind", {"full_attention": FLEX}),
        ("attention_backend", "speculative_config.attention_backend", FLEX),
    ],
)
def test_on_cuda_a_backend_that_carries_no_trees_is_refused(
    on_cuda: VllmConfig, option: str, path: str, value: Any
) -> None:
    check.refuse_unserved(on_cuda, DynTreeOptions(), "cuda", WORKERS)
    with pytest.raises(ValueError) as error:
        check.refuse_unserved(changed(on_cuda, path, value), DynTreeOptions(), "cuda", WORKERS)
    reason = str(error.value)
    assert f"{option}=" in reason
    assert ("FLASH_ATTN, FLASHINFER and TRITON_ATTN" in reason) == (option == "attention_backend")


def test_on_cuda_a_backend_that_carries_trees_may_be_named(on_cuda: VllmConfig) -> None:
    for name in cuda_backends.CUDA_BACKENDS:
        named = changed(on_cuda, "attention_config.backend", SimpleNamespace(name=name))
        check.refuse_unserved(named, DynTreeOptions(), "cuda", WORKERS)


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
    with pytest.raises(
        ValueError, match=r"'neon', but trees need one of .*use an x86 CPU"
    ) as error:
        build()
    assert "target model: head_size=32, dtype=float32 is not supported" in str(error.value)
    assert "draft model: " in str(error.value)


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
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    ask = classmethod(lambda cls: DeviceCapability(*capability))
    monkeypatch.setattr(type(current_platform), "get_device_capability", ask)
    config = changed(on_cuda, "model_config.model_arch_config.head_size", head_size)
    config = changed(config, "model_config.dtype", torch.bfloat16)
    refused = pytest.raises(check.Refused, match=reason) if reason else nullcontext()
    with refused:
        check.refuse_unserved(config, DynTreeOptions(), "cuda", WORKERS, served.refusal)


def test_a_kernel_table_is_read_before_anything_loads(
    admitted: VllmConfig, on_cuda: VllmConfig, tmp_path: Path
) -> None:
    table = tmp_path / "kernels.json"
    options = DynTreeOptions(kernel_table=str(table))
    for content, reason in ((None, "No such file"), ("{}", "must be a result file")):
        if content is not None:
            table.write_text(content)
        with pytest.raises(check.Refused, match=rf"dyntree\.kernel_table='.*{reason}"):
            check.refuse_unserved(on_cuda, options, "cuda", WORKERS)
    table.write_text('{"attention": []}')
    check.refuse_unserved(on_cuda, options, "cuda", WORKERS)
    with pytest.raises(check.Refused, match=r"kernel_table='.*' is for CUDA"):
        check.refuse_unserved(admitted, options, "cpu", WORKERS)


def test_flashinfer_by_name_is_refused_where_it_cannot_serve(
    admitted: VllmConfig, on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DynTreeOptions(attention="flashinfer")
    with pytest.raises(check.Refused, match="attention='flashinfer' is for CUDA"):
        check.refuse_unserved(admitted, options, "cpu", WORKERS)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: None)
    with pytest.raises(check.Refused, match="needs FlashInfer: pip install"):
        check.refuse_unserved(on_cuda, options, "cuda", WORKERS)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: name)
    with pytest.raises(check.Refused, match=r"cannot be followed: .*allowed: .*; use triton"):
        check.refuse_unserved(on_cuda, options, "cuda", WORKERS)
    quantised = changed(on_cuda, "cache_config.cache_dtype", "fp8")
    with pytest.raises(check.Refused, match="cannot be followed with a KV cache in fp8"):
        check.refuse_unserved(quantised, options, "cuda", WORKERS)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(check.Refused, match="cannot be followed with VLLM_BATCH_INVARIANT=1"):
        check.refuse_unserved(on_cuda, options, "cuda", WORKERS)
    check.refuse_unserved(on_cuda, DynTreeOptions(attention="triton"), "cuda", WORKERS)
