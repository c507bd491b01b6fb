"""FlashAttention in plain torch, as far as a cascade calls it: the arguments of vLLM's library.

A schedule is a copy of the lengths that it was made for. A row without a context gets zeros, and a
log-sum-exp that no merge may read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Launch = Callable[..., None]


def _write_schedule(schedule: torch.Tensor, lengths: torch.Tensor) -> None:
    schedule.copy_(lengths + 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    schedule: torch.Tensor | None,
    scale: float,
) -> None:
    """Compute attention of all rows of each request to all of its ``lengths`` leading positions."""
    assert schedule is None or torch.equal(schedule, lengths + 1), "it is of another step"
    assert (lengths >= 0).all()
    out.zero_()
    lse.fill_(torch.inf)
    bounds, group = starts.tolist(), q.shape[1] // k.shape[2]
    for request, length in enumerate(lengths.tolist()):
        first, last = bounds[request : request + 2]
        if last == first or length == 0:
            continue
        at = torch.arange(length, device=q.device)
        blocks, places = table[request, at // k.shape[1]].long(), at % k.shape[1]
        keys, values = (x[blocks, places].repeat_interleave(group, 1).double() for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q[first:last].double(), keys) * scale
        lse[:, first:last] = scores.logsumexp(-1)
        out[first:last] = torch.einsum("hts,shd->thd", scores.softmax(-1), values)


class Library:
    """Replaces the module `vllm.vllm_flash_attn`; ``recorded`` wraps what runs on a device."""

    def __init__(self, recorded: Callable[[Launch], Launch] = lambda launch: launch) -> None:
        self._write_schedule, self._attend = recorded(_write_schedule), recorded(_attend)

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: torch.Tensor,
        qkv_dtype: torch.dtype,
        cu_seqlens_q: torch.Tensor,
        page_size: int,
        causal: bool,
        num_splits: int,
    ) -> torch.Tensor:
        assert not causal
        assert len(cache_seqlens) == batch_size == len(cu_seqlens_q) - 1
        schedule = torch.empty_like(cache_seqlens)
        self._write_schedule(schedule, cache_seqlens)
        return schedule

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        seqused_k: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        block_table: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor,
        scheduler_metadata: torch.Tensor | None,
        num_splits: int,
        fa_version: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not causal
        assert return_softmax_lse
        assert fa_version in (3, 4)
        assert (scheduler_metadata is None) == (fa_version == 4)
        assert all(x.stride(-1) == 1 for x in (q, k, v, out, block_table))
        lse = torch.empty(q.shape[1], len(q), device=q.device)
        self._attend(
            q, k, v, out, lse, cu_seqlens_q, seqused_k, block_table, scheduler_metadata,
            softmax_scale,
        )  # fmt: skip
        return out, lse
