"""Replacements of vLLM's kernels of sparse latent attention on CUDA."""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import torch

from emulated.attention import FLOAT8, in_float8
from emulated.device import PROCESSORS, recorded

_SCALE_BYTES = 4
_FLASH = "vllm.vllm_flash_attn"


def _index_keys(
    cache: torch.Tensor, table: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a request's first keys [count, D] and scales [count] from an indexer's cache [blocks,
    N, D + 4] of bytes, where the keys of a block come before its scales."""
    blocks, page, width = cache.shape
    memory, keys = cache.view(blocks, page * width), page * (width - _SCALE_BYTES)
    at = torch.arange(count)
    block, place = table[at // page].long(), at % page
    values = memory[:, :keys].unflatten(1, (page, -1))[block, place]
    scales = memory[:, keys:].unflatten(1, (page, -1))[block, place]
    return values.view(FLOAT8).float(), scales.view(torch.float32).flatten()


def _scores(
    q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the logits [N] of one row's queries [H, D]."""
    return ((q.float() @ keys.T).relu() * weights[:, None]).sum(0) * scales


def _paged_logits(
    logits: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Write the logits of rows that are served alone; what follows a row's length is garbage."""
    logits.fill_(torch.inf)
    for row, length in enumerate(lengths.flatten().tolist()):
        keys, scales = _index_keys(cache, tables[row], length)
        logits[row, :length] = _scores(q[row, 0], keys, scales, weights[row])


def _fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, None],
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    schedule: torch.Tensor,
    max_model_len: int,
    **_: Any,
) -> torch.Tensor:
    logits = torch.empty(len(weights), max_model_len)
    recorded(_paged_logits)(logits, q[0], cache.squeeze(2), weights, lengths, tables)
    return logits


def _fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, None],
    keys: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    values, scales = keys
    rows = zip(q[0].float(), weights, strict=True)
    return torch.stack([_scores(row, values.float(), scales, of_row) for row, of_row in rows])


def _gather_index_keys(
    cache: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    tables: torch.Tensor,
    bounds: torch.Tensor,
) -> None:
    """Write the keys [T, D] and scales [T, 4] of requests, as bytes."""
    for request, (first, last) in enumerate(pairwise(bounds.tolist())):
        values, of_values = _index_keys(cache, tables[request], last - first)
        keys[first:last] = values.to(FLOAT8)
        scales[first:last] = of_values[:, None].view(torch.uint8)


def _cache_index_keys(
    keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    """Write keys [T, D] to an indexer's cache; a slot of -1 is not written."""
    blocks, page, width = cache.shape
    memory, end = cache.view(blocks, page * width), page * (width - _SCALE_BYTES)
    rows = (slots >= 0).nonzero().flatten()
    at = slots[rows] // page, slots[rows] % page
    values, scales = in_float8(keys[rows])
    memory[:, :end].unflatten(1, (page, -1))[at] = values.view(torch.uint8)
    memory[:, end:].unflatten(1, (page, -1))[at] = scales.view(torch.uint8)


def _select(logits: torch.Tensor, selected: torch.Tensor, begin: int, end: int) -> None:
    """Select the best positions of a row, counted from ``begin``; all of a short one.

    Of equal logits, such as 0 where no query agrees with a key, the first ones are selected: those
    of vLLM's kernels may be any.
    """
    count = min(end - begin, len(selected))
    selected.fill_(-1)
    best = logits[begin:end].sort(descending=True, stable=True).indices[:count]
    selected[:count] = (best if end - begin > count else torch.arange(count)).int()


def _select_of_prompts(
    logits: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, selected: torch.Tensor, *_: int
) -> None:
    for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        _select(logits[row], selected[row], begin, end)


def _select_of_rows(
    logits: torch.Tensor, next_n: int, lengths: torch.Tensor, selected: torch.Tensor, *_: int
) -> None:
    for row, length in enumerate(lengths.flatten().tolist()):
        _select(logits[row], selected[row], 0, length)


def _weights(
    q: torch.Tensor, vectors: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the weights [H, N] of vectors [N, D] in the attention of queries [H, D]. ``sinks``
    [H]: logits that no vector belongs to."""
    logits = q.float() @ vectors.T * scale
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None]], dim=1)
    return logits.softmax(-1)[:, : len(vectors)]


def _attend(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    at: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend from rows [T, H, V + R] to the cached vectors [N, V + R] at [T, K], -1 is none; of
    each row only to the first ``lengths``, as FlashMLA does."""
    for row in range(len(q)):
        of_row = at[row] if lengths is None else at[row, : lengths[row]]
        read = of_row[of_row >= 0].long()
        vectors = (
            kv[read] if kv.dtype != FLOAT8 else kv.view(torch.uint8)[read].view(FLOAT8).float()
        )
        out[row] = _weights(q[row], vectors, scale, sinks) @ vectors[:, : out.shape[-1]]


def _flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    at: torch.Tensor,
    scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    out = torch.empty(*q.shape[:2], 512)
    recorded(_attend)(out, q, kv[:, 0], at[:, 0], topk_length, scale, attn_sink)
    return out, None, out[..., 0]


def _attend_packed(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    at: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    """Attend from rows [T, H, V + R] to vectors in a cache [blocks, N, 656] of bytes: 512 values in
    FP8, a scale of each 128, and 64 rotated ones in bfloat16."""
    for row in range(len(q)):
        slots = at[row][at[row] >= 0].long()
        of_row = cache[slots // cache.shape[1], slots % cache.shape[1]]
        scales = of_row[:, 512:528].clone().view(torch.float32).repeat_interleave(128, dim=1)
        values = of_row[:, :512].clone().view(FLOAT8).float() * scales
        vectors = torch.cat([values, of_row[:, 528:].clone().view(torch.bfloat16).float()], dim=1)
        out[row] = _weights(q[row], vectors, scale, sinks) @ values


def _flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    (one,) = q
    out = torch.empty(1, *one.shape[:2], 512)
    recorded(_attend_packed)(out[0], one, k_cache[:, :, 0], indices[0], softmax_scale, attn_sink)
    return out, out.new_empty(1, one.shape[1], len(one))


def _flash_attn(
    impl: Any,
    q: torch.Tensor,
    rotated: torch.Tensor,
    kv: torch.Tensor,
    at: torch.Tensor,
    lengths: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    out = torch.empty_like(q)
    recorded(_attend)(out, torch.cat([q, rotated], dim=-1), kv, at, lengths, impl.scale)
    return out


def _flashinfer(
    impl: Any, q: torch.Tensor, kv: torch.Tensor, at: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, None]:
    out = torch.empty(*q.shape[:2], impl.kv_lora_rank)
    recorded(_attend)(out, q, kv.view(q.dtype).flatten(0, 1), at, lengths, impl.bmm1_scale)
    return out * impl.bmm2_scale, None


def _concat_mla_q(of_values: torch.Tensor, rotated: torch.Tensor, q: torch.Tensor) -> None:
    q[:, : of_values.shape[1]] = torch.cat([of_values, rotated], dim=-1)


def _backend(stock: Any) -> Any:
    """Choose as on CUDA where attention is sparse, which vLLM for CPUs refuses."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def get_attn_backend_cls(cls: Any, named: Any, *args: Any, **kwargs: Any) -> str:
        if kwargs["attn_selector_config"].use_sparse:
            return str((named or AttentionBackendEnum.FLASHMLA_SPARSE).get_path())
        return str(stock(named, *args, **kwargs))

    return classmethod(get_attn_backend_cls)


def stand_in() -> None:
    """Replace vLLM's kernels by those of this module."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.models import deepseek_v32
    from vllm.models.deepseek_v32.nvidia import model, mtp
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import (
        flashinfer_mla_sparse,
        flashmla_sparse,
        index_group,
        indexer,
        sparse_utils,
    )

    logits: Any = sparse_attn_indexer
    logits.fp8_fp4_paged_mqa_logits = _fp8_fp4_paged_mqa_logits
    logits.fp8_fp4_mqa_logits = _fp8_fp4_mqa_logits
    operators: Any = _custom_ops
    operators.cp_gather_indexer_k_quant_cache = recorded(_gather_index_keys)
    operators.top_k_per_row_prefill = recorded(_select_of_prompts)
    operators.top_k_per_row_decode = recorded(_select_of_rows)
    operators.concat_mla_q = recorded(_concat_mla_q)
    attention: Any = flashmla_sparse
    attention.flash_mla_sparse_fwd = _flash_mla_sparse_fwd
    attention.flash_mla_with_kvcache = _flash_mla_with_kvcache
    attention.get_mla_metadata = lambda: (object(), None)
    attention.num_compute_units = lambda device: PROCESSORS
    # vLLM converts at least 128 indices at once, more than a small target selects.
    convert = partial(sparse_utils.triton_convert_req_index_to_global_index, BLOCK_N=8)
    attention.triton_convert_req_index_to_global_index = convert
    without_package = {name: MagicMock() for name in (_FLASH, f"{_FLASH}.flash_attn_interface")}
    with mock.patch.dict(sys.modules, without_package):
        from vllm.v1.attention.backends.mla import flashattn_mla_sparse
    sys.modules[flashattn_mla_sparse.__name__] = flashattn_mla_sparse
    others: Any = flashattn_mla_sparse
    others.triton_convert_req_index_to_global_index = convert
    others.FlashAttnMLASparseImpl._run_mqa_kernel = _flash_attn
    others = flashinfer_mla_sparse
    others._get_workspace_buffer = lambda device: torch.empty(0)
    others.FlashInferMLASparseImpl._run_mqa_kernel = _flashinfer
    of_indexer: Any = indexer
    of_indexer.num_compute_units = lambda device: PROCESSORS
    package: Any = deepseek_v32
    package.DeepseekV32ForCausalLM = model.DeepseekV32ForCausalLM
    package.GlmMoeDsaForCausalLM = model.DeepseekV32ForCausalLM
    package.DeepseekV32MTP = mtp.DeepseekV32MTP
    platform: Any = type(current_platform)
    platform.get_attn_backend_cls = _backend(platform.get_attn_backend_cls)
    # Indices are converted on a stream beside.
    streams: Any = index_group
    streams.triton_convert_req_index_to_global_index = convert
    streams._create_side_stream = lambda device: MagicMock()
    streams._create_event = streams.current_stream = MagicMock
    _stand_in_for_hy4()


def _stand_in_for_hy4() -> None:
    """Replace what Hy4 runs in its own way, and let its backend take float32."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.models.hy_v4.nvidia import attention, flashmla_sparse
    from vllm.platforms.interface import DeviceCapability

    operators: Any = _custom_ops
    operators.indexer_k_quant_and_cache = recorded(_cache_index_keys)
    operations: Any = torch.ops.vllm
    operations.sparse_attn_indexer = sparse_attn_indexer.sparse_attn_indexer
    indexer: Any = sparse_attn_indexer.SparseAttnIndexer
    indexer.forward_cpu = indexer.forward_cuda
    own: Any = attention
    own.per_token_group_quant_fp8 = lambda x, *_, **__: in_float8(x)
    own.current_platform = SimpleNamespace(get_device_capability=lambda: DeviceCapability(9, 0))
    kernels: Any = flashmla_sparse
    kernels.flash_mla_sparse_fwd = _flash_mla_sparse_fwd
    kernels.flash_mla_with_kvcache = _flash_mla_with_kvcache
    kernels.HYV4FlashMLASparseBackend.validate_configuration = classmethod(lambda *_, **__: [])
