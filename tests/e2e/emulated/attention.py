"""Replacements of vLLM's own CUDA attention kernels, which are not under test."""

from __future__ import annotations

from typing import Any

import torch
from flash_in_torch import Library

from emulated.device import recorded

FLOAT8 = torch.float8_e4m3fn


def _reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    """Write rows [T, Hkv, D] to caches [blocks, N, Hkv, D]. A slot of -1 is not written."""
    rows = (slots >= 0).nonzero().flatten()
    at = slots[rows]
    block, place = at // key_cache.shape[1], at % key_cache.shape[1]
    key_cache[block, place] = key[rows]
    value_cache[block, place] = value[rows]


def _reshape_and_cache_of_two_sizes(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    """Write rows [T, Hkv, D] and [T, Hkv, V] to a cache [blocks, N, Hkv, D + V]."""
    _reshape_and_cache(key, value, *cache.split([key.shape[2], value.shape[2]], dim=-1), slots)


def _unified_attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    block_table: torch.Tensor,
    window_size: tuple[int, int],
    sinks: torch.Tensor | None = None,
    mm_prefix_range: torch.Tensor | None = None,
    mm_prefix_clamp_sliding_window: bool = False,
    **_: Any,
) -> None:
    """Compute causal attention of each request's last rows over its ``seqused_k`` cached rows, of
    which a row sees ``window_size[0]`` before its own, or all for -1. ``sinks`` [H]: logits that no
    value belongs to.

    ``mm_prefix_range`` [R, N, 2]: places of images, whose rows see each other both ways; with
    ``mm_prefix_clamp_sliding_window`` none that is before their window. Without a place, first and
    last are 0.
    """
    group = q.shape[1] // k.shape[2]
    bounds = cu_seqlens_q.tolist()
    for request, length in enumerate(seqused_k.tolist()):
        first, last = bounds[request : request + 2]
        if last == first:
            continue
        at = torch.arange(max(length, 1))
        blocks, places = block_table[request, at // k.shape[1]].long(), at % k.shape[1]
        keys, values = (x[blocks, places].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q[first:last], keys) * softmax_scale
        own = (length - last + torch.arange(first, last))[:, None]
        before = window_size[0] if window_size[0] >= 0 else length
        seen = (at <= own) & (at >= own - before)
        for begin, end in [] if mm_prefix_range is None else mm_prefix_range[request].tolist():
            inside = (own >= begin) & (own <= end) & (at >= begin) & (at <= end) & (begin < end)
            seen |= inside & (at >= own - before) if mm_prefix_clamp_sliding_window else inside
        values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)  # freed blocks hold anything
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            of_heads = sinks[:, None, None].expand(-1, len(own), 1)
            scores = torch.cat([scores, of_heads], dim=-1)
        weights = scores.softmax(dim=-1).nan_to_num()[..., : len(at)]
        out[first:last] = torch.einsum("hts,shd->thd", weights, values)


def _decode_latent(
    q: torch.Tensor,
    cache: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    logits: torch.Tensor,
    splits: int,
    scale: float,
    *_: Any,
    k_scale: torch.Tensor,
    **__: Any,
) -> None:
    """Compute latent attention of one row [H, D] for each request over its cached rows, which may
    be quantised."""
    for request, length in enumerate(seq_lens.tolist()):
        at = torch.arange(length)
        blocks, places = block_table[request, at // cache.shape[1]].long(), at % cache.shape[1]
        # Of elements of one byte, torch reads bytes alone by index.
        keys = cache.view(torch.uint8)[blocks, places, 0].view(cache.dtype).to(q.dtype) * k_scale
        scores = (q[request] @ keys.T * scale).softmax(dim=-1)
        out[request] = scores @ keys[:, : out.shape[-1]]


def in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [..., D] in groups of 128; return them and their scales, powers of two."""
    groups = x.float().unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1).clamp(min=1e-10)
    scales = torch.exp2((largest / torch.finfo(FLOAT8).max).log2().ceil())
    return (groups / scales[..., None]).flatten(-2).to(FLOAT8), scales


def _cache_latent(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Write rows [T, R] and [T, D] to a cache [blocks, N, R + D], which may be quantised, or packed
    [blocks, N, bytes]. A slot of -1 is not written."""
    rows = (slots >= 0).nonzero().flatten()
    at = slots[rows]
    latents = torch.cat([kv_c, k_pe], dim=-1)[rows]
    if kv_cache_dtype == "fp8_ds_mla":
        values, scales = in_float8(kv_c[rows])
        parts = values, scales, k_pe[rows].bfloat16()
        latents = torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
    elif cache.dtype == torch.uint8:
        latents = (latents / scale).to(FLOAT8).view(torch.uint8)
    cache[at // cache.shape[1], at % cache.shape[1]] = latents


def _multiply_in_order(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """Multiply [B, M, K] and [B, K, N] so that a row's bits do not depend on others, as vLLM's
    batch-invariant mode does on CUDA."""
    out.copy_((a[..., None].float() * b[:, None]).sum(-2))


def _scaled(layer: Any, register_buffer: bool = False) -> None:
    """Give a layer of latent attention whose checkpoint has no scale another one than 1."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    set_default_quant_scales(layer, register_buffer)
    if layer.kv_cache_dtype.startswith("fp8"):
        layer._k_scale.fill_(0.3)


def stand_in() -> None:
    """Replace vLLM's kernels by those of this module."""
    from vllm import _custom_ops, envs
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.attention.backends import triton_attn, triton_attn_diffkv
    from vllm.v1.attention.backends.mla import triton_mla

    module: Any = triton_attn
    module.unified_attention = recorded(_unified_attention)
    module.triton_reshape_and_cache_flash = recorded(_reshape_and_cache)
    of_two_sizes: Any = triton_attn_diffkv
    of_two_sizes.unified_attention_diffkv = recorded(_unified_attention)
    of_two_sizes.triton_reshape_and_cache_flash_diffkv = recorded(_reshape_and_cache_of_two_sizes)
    of_latent: Any = triton_mla
    of_latent.decode_attention_fwd = recorded(_decode_latent)
    operators: Any = _custom_ops
    operators.concat_and_cache_mla = recorded(_cache_latent)
    layers: Any = mla_attention
    layers.set_default_quant_scales = _scaled
    if envs.VLLM_BATCH_INVARIANT:
        of_torch: Any = torch
        of_torch.bmm = _multiply_in_order
        # Their bits are checked at the start.
        of_experts: Any = CPUUnquantizedExperts
        of_experts._supports_batch_invariance = staticmethod(lambda: True)
    _offer_cascade()


def _offer_cascade() -> None:
    """Let an engine have the cascade, in float32 as well, if it asks for it."""
    from dyntree_kernels import dispatch
    from dyntree_kernels.cuda.cascade import Cascade
    from dyntree_plugin.admission import attention_kernels
    from dyntree_plugin.engine.attention import choice

    library = Library(recorded)
    dispatch._OBSTACLE["cascade"] = lambda problem: None
    everywhere: Any = attention_kernels, choice
    everywhere[0]._without_flash_attention = lambda *_: ()
    everywhere[1].cascade_of = lambda problem: Cascade(library, 3)
