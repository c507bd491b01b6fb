"""Check before weights load that this hardware has a kernel for a model's tree attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dyntree_kernels import dispatch
from dyntree_kernels.features import KV_CACHE_DTYPES

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_USUAL_BLOCK = 128
"""vLLM's block size on a CPU. All that matters is that it is a multiple of 32."""


def refusal(model: ModelConfig, device_type: str, cache_dtype: str) -> str | None:
    """Return why no kernel serves the model's shape and type here, or None if one does.

    ``cache_dtype``: vLLM's name of the type of the KV cache.
    """
    from vllm.platforms import current_platform

    dtype = getattr(torch, str(model.dtype).removeprefix("torch."))
    head_size = model.get_head_size()
    shape = f"head_size={head_size}, dtype={str(dtype).removeprefix('torch.')}"
    capability = None
    if device_type == "cuda":
        if model.use_mla:  # That kernel's accumulators are as long as the values.
            head_size = model.hf_text_config.kv_lora_rank
        capability = current_platform.get_device_capability()
        if capability is None:
            return None  # The capability is checked when attention is set up.
    elif unread := _unread_layout(dtype, head_size, cache_dtype):
        return f"{shape} is not supported on this CPU: {unread}"
    problem = dispatch.Problem(
        device=device_type,
        capability=capability and (capability.major, capability.minor),
        heads=max(model.model_arch_config.total_num_attention_heads, 1),
        kv_heads=max(model.get_total_num_kv_heads(), 1),
        head_size=head_size,
        dtype=dtype,
        kv_dtype=torch.float8_e4m3fn if cache_dtype in KV_CACHE_DTYPES else dtype,
        rows=1,
        context=1,
    )
    # The draft's forwards use Triton on every GPU, whatever the target's trees use.
    needed = {"triton"} if capability else dispatch.installed() & {"cpu"}
    try:
        dispatch.choose(problem, needed)
    except ValueError as error:
        named = str(error).partition(") (")[2].removesuffix(")").split("; ")
        obstacles = [each for each in named if not each.endswith(": not installed")] or named
        return f"{shape} is not supported here: {'; '.join(obstacles)}"
    return None


def _unread_layout(dtype: torch.dtype, head_size: int, cache_dtype: str) -> str | None:
    """Return why dyntree's kernels cannot read the KV cache as vLLM packs it on this CPU."""
    from vllm.v1.attention.backends import cpu_attn

    from dyntree_kernels.cpu.layout import ISAS

    try:
        isa = cpu_attn._get_attn_isa(dtype, _USUAL_BLOCK, head_size, cache_dtype)
    except NotImplementedError as error:
        return f"kv_cache_dtype={cache_dtype!r}: {error} Set it to the model's type"
    if isa in ISAS:
        return None
    allowed = ", ".join(ISAS)
    return f"vLLM packs its KV cache as {isa!r}, but trees need one of {allowed}; use an x86 CPU"
