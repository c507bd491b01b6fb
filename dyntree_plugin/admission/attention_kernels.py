"""Refuse the options that choose a kernel of tree attention where they cannot be followed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission import versions
from dyntree_plugin.admission.refusals import kv_cache_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dyntree_plugin.options.options import DynTreeOptions


def kernel_refusals(
    vllm_config: VllmConfig, options: DynTreeOptions, device_type: str
) -> Iterator[str]:
    """Yield why `attention` and `kernel_table` cannot be followed."""
    for name in sorted({"attention", "kernel_table"} & options.model_fields_set):
        given = f"dyntree.{name}={getattr(options, name)!r}"
        if device_type != "cuda":
            yield f"{given} is for CUDA, which has several kernels; leave it out"
        elif name == "kernel_table" and options.kernel_table is not None:
            yield from _unreadable(given, options.kernel_table)
        elif name == "attention" and options.attention in ("cascade", "flashinfer"):
            yield from _unserved(given, vllm_config, options.attention)


def _unreadable(given: str, path: str) -> Iterator[str]:
    from dyntree_kernels.dispatch import load_table

    try:
        load_table(Path(path))
    except (OSError, ValueError) as error:
        yield f"{given} must be a result file of `python -m benchmarks.kernels`: {error}"


def _unserved(given: str, vllm_config: VllmConfig, asked: str) -> Iterator[str]:
    from vllm import envs

    if asked == "flashinfer" and find_spec("flashinfer") is None:
        yield f"{given} needs FlashInfer: pip install '{versions.FLASHINFER}'"
        return
    if envs.VLLM_BATCH_INVARIANT:
        yield f"{given} cannot be followed with VLLM_BATCH_INVARIANT=1; use triton"
        return
    if (cache := kv_cache_dtype(vllm_config)) in KV_CACHE_DTYPES:
        yield f"{given} cannot be followed with a KV cache in {cache}; use triton"
        return
    yield from (_without_flash_attention if asked == "cascade" else _without_variant)(
        given, vllm_config
    )


def _without_flash_attention(given: str, vllm_config: VllmConfig) -> Iterator[str]:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    model = vllm_config.model_config
    size, dtype = model.get_head_size(), str(model.dtype).removeprefix("torch.")
    with set_current_vllm_config(vllm_config):  # its attention_config may name a version
        version = get_flash_attn_version(head_size=size)
    if version not in (3, 4) or size > 256 or dtype not in ("float16", "bfloat16"):
        yield (
            f"{given} needs vLLM's FlashAttention 3 or 4, a GPU of capability 9 or 10, float16 or "
            f"bfloat16, and head sizes up to 256; found version {version}, {dtype} and {size}; "
            "use triton"
        )


def _without_variant(given: str, vllm_config: VllmConfig) -> Iterator[str]:
    import torch

    from dyntree_kernels.cuda.flashinfer_variant import Variant, find_cuda_home

    model = vllm_config.model_config
    dtype = getattr(torch, str(model.dtype).removeprefix("torch."))
    try:
        variant = Variant(dtype, dtype, model.get_head_size())
        if not variant.is_built():
            find_cuda_home()
    except (ValueError, RuntimeError) as error:
        yield f"{given} cannot be followed: {error}; use triton"
