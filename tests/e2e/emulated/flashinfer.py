"""Replacements of FlashInfer, and of the GPU that vLLM's FlashInfer backend asks about.

A plan keeps what it is given. Running it computes causal attention over the pages and lengths of
the plan, as the library does, and over no others.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import Any

import torch
import xqa_in_torch
from absent_flashinfer import vllms_backend

from dyntree_kernels import dispatch
from dyntree_kernels.cuda import xqa
from dyntree_plugin.engine.attention import choice
from emulated.attention import _reshape_and_cache, _unified_attention
from emulated.device import recorded

runs: Counter[str] = Counter()
"""How often each of vLLM's kernels was launched outside of graphs, or captured."""

Pair = tuple[torch.Tensor, torch.Tensor]


def _by_slot(cache: Pair, layout: str) -> Pair:
    """Return keys and values as [blocks, N, Hkv, D]."""
    keys, values = cache
    return (keys.transpose(1, 2), values.transpose(1, 2)) if layout == "HND" else (keys, values)


def _attend(
    of: str,
    q: torch.Tensor,
    cache: Pair,
    layout: str,
    out: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    keys, values = _by_slot(cache, layout)
    runs[of] += 1
    _launch(
        q=q,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=starts,
        seqused_k=lengths,
        softmax_scale=scale,
        block_table=table,
        window_size=(window, 0),
    )


_launch = recorded(_unified_attention)


class Wrapper:
    """Replaces FlashInfer's wrappers of prefill and decode: `plan` once, then `run` per layer."""

    def __init__(self, workspace: torch.Tensor, layout: str, *_: Any, **__: Any) -> None:
        self._layout = layout
        self.is_cuda_graph_enabled = False

    def plan(
        self,
        *,
        paged_kv_indices: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        qo_indptr: torch.Tensor,
        page_size: int,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        causal: bool,
        **_: Any,
    ) -> None:
        self._sm_scale, self._window_left, self._causal = sm_scale, window_left, causal
        self._logits_soft_cap = logits_soft_cap or 0.0
        self._starts, self._page = qo_indptr.clone(), page_size
        pages = torch.diff(paged_kv_indptr)
        self._lengths = ((pages - 1) * page_size + paged_kv_last_page_len).clamp(min=0)
        self._table = torch.zeros(len(pages), max(int(pages.max()), 1), dtype=torch.int32)
        for request, first in enumerate(paged_kv_indptr[:-1].tolist()):
            count = int(pages[request])
            self._table[request, :count] = paged_kv_indices[first : first + count]

    def run(self, q: torch.Tensor, cache: Pair, *, out: torch.Tensor, **_: Any) -> None:
        if cache[0].shape[2 if self._layout == "HND" else 1] != self._page:
            raise RuntimeError(f"planned for pages of {self._page}, got {cache[0].shape}")
        _attend(
            "prefill", q, cache, self._layout, out, self._starts, self._lengths, self._table,
            self._sm_scale, self._window_left,
        )  # fmt: skip


class DecodeWrapper(Wrapper):
    """Is planned for requests with rows that are not read, since trees' kernel overwrites them."""

    def plan(
        self, *, sm_scale: float, window_left: int, logits_soft_cap: float | None, **_: Any
    ) -> None:
        self._sm_scale, self._window_left = sm_scale, window_left
        self._logits_soft_cap = logits_soft_cap or 0.0

    def run(self, q: torch.Tensor, cache: Pair, *, out: torch.Tensor, **_: Any) -> None:
        out.fill_(float("nan"))


def _decode(
    query: torch.Tensor,
    kv_cache: Pair,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    window_left: int,
    out: torch.Tensor,
    kv_layout: str,
    q_len_per_req: int,
    mask: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """Replace XQA, and TensorRT-LLM's kernel for decodes."""
    if q_len_per_req != 1 or mask is not None or len(query) != len(seq_lens):
        raise RuntimeError(f"{len(seq_lens)} requests were to decode {q_len_per_req} rows each")
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    _attend(
        "decode", query, kv_cache, kv_layout, out, starts, seq_lens, block_tables, bmm1_scale,
        window_left,
    )  # fmt: skip


def _context(
    query: torch.Tensor,
    kv_cache: Pair,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    cum_seq_lens_q: torch.Tensor,
    window_left: int,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """Replace TensorRT-LLM's kernel for prompts."""
    _attend(
        "TensorRT-LLM prefill", query, kv_cache, "HND", out, cum_seq_lens_q, seq_lens,
        block_tables, bmm1_scale, window_left,
    )  # fmt: skip


def _lengths(indptr: torch.Tensor, last: torch.Tensor, page: int) -> torch.Tensor:
    return (torch.diff(indptr) - 1).clamp(min=0) * page + last


_LIBRARY: dict[str, Any] = {
    "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
    "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
    "get_seq_lens": _lengths,
    "trtllm_batch_decode_with_kv_cache": _decode,
    "trtllm_batch_context_with_kv_cache": _context,
    "get_device_sm_count": lambda device: 1,
    "get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda *_: 1,
}


class _Xqa(xqa_in_torch.Library):
    """FlashInfer's XQA over trees, with a module for any layers."""

    _launch = staticmethod(recorded(xqa_in_torch.xqa))

    @functools.wraps(xqa_in_torch.xqa)
    def xqa(self, *args: Any, **kwargs: Any) -> None:
        runs["XQA of trees"] += 1
        self._launch(*args, **kwargs)


def _take_xqa() -> None:
    """Let XQA, in float32 as well, serve batches of trees alone."""

    library = _Xqa()

    def built(problem: dispatch.Problem) -> xqa.Xqa:
        group = problem.heads // problem.kv_heads
        module = xqa.Xqa(problem.dtype, problem.head_size, group, problem.block_size)
        library.built.add(module._arguments(2)[:-2])
        return module

    fastest = dispatch.Measurement("xqa", "NVIDIA H200", 2, 32, "float32", 9, 64, 1.0)
    sys.modules["flashinfer.xqa"] = library
    dispatch._OBSTACLE["xqa"] = lambda problem: None
    everywhere: Any = dispatch, choice
    everywhere[0].shipped_table = lambda: [fastest]
    everywhere[1].xqa_module = built


def _waits() -> Any:
    raise RuntimeError("vLLM waits for the lengths of requests")


def _copy_page_indices(
    indices: torch.Tensor, table: torch.Tensor, stride: int, starts: torch.Tensor, **_: Any
) -> None:
    for request, first in enumerate(starts[:-1].tolist()):
        count = int(starts[request + 1]) - first
        indices[first : first + count] = table[request, :count]


class _PageIndices:
    def __getitem__(self, grid: Any) -> Any:
        return _copy_page_indices


def stand_in(capability: tuple[int, int]) -> None:
    """Let vLLM's FlashInfer backend serve all layers, as on a GPU of ``capability``."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import flashinfer as library

    from emulated import worker

    of = DeviceCapability(*capability)
    known = {"get_device_capability": classmethod(lambda cls, device_id=0: of)}
    gpu: Any = type("GPU", (type(current_platform),), known)()
    backend = vllms_backend(_LIBRARY)
    asked: Any = library
    backend.current_platform = asked.current_platform = gpu
    asked.has_nvidia_artifactory = lambda: True
    backend.flashinfer_xqa_batch_decode_with_kv_cache = _decode
    backend.pin_host_range_buf = lambda length: None
    backend._get_trtllm_workspace_buffer = lambda: torch.zeros(1, dtype=torch.uint8)
    backend._copy_page_indices_kernel = _PageIndices()
    backend._get_multi_ctas_kv_counter_buffer = lambda *_: None
    backend.gpu_sync_allowed = _waits
    if capability == (9, 0):
        _take_xqa()
    operators: Any = torch.ops._C_cache_ops
    operators.reshape_and_cache_flash = recorded(_reshape_and_cache)
    worker._BACKENDS["CPU_ATTN"] = (
        "dyntree_plugin.engine.attention.cuda_flashinfer.TreeFlashInferBackend"
    )
