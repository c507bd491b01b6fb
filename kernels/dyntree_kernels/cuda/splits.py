"""Several programs share the columns of a tile, and a second kernel adds up what they found."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LEAST_TILES = tl.constexpr(4)
"""Tiles of a split, if there are as many. A split of fewer spends its time on the first tile's
latency, and each writes a whole tile of partial results, which the reduction reads."""


@triton.jit
def tiles_of_a_split(tiles, SPLITS: tl.constexpr):
    """How many of so many tiles a split takes; the last splits may have none."""
    if SPLITS == 1:
        return tiles
    return tl.maximum(tl.cdiv(tiles, SPLITS), LEAST_TILES)


@triton.jit
def store_part(
    PARTIAL, MAXIMA, SUMS, part, real, m, total, acc, BM: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Write a split's rows from row `part` on. Of rows that saw nothing only that is written."""
    r = tl.arange(0, BM)
    at = PARTIAL + part * DP + (r * DP)[:, None] + tl.arange(0, DP)[None, :]
    tl.store(at, acc, mask=(real & (total != 0))[:, None])
    tl.store(MAXIMA + part + r, m, mask=real)
    tl.store(SUMS + part + r, total, mask=real)


@triton.jit
def _reduce_splits(
    OUT, PARTIAL, MAXIMA, SUMS, CTX, INDPTR, packed_rows, so_t, so_h,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    LOADED: tl.constexpr,
):  # fmt: skip
    """One row of one head: all of its partial results are loaded at once, so that it waits for
    the memory twice, however many there are."""
    node = tl.program_id(0)
    request = tl.program_id(1)
    head = tl.program_id(2)
    first = tl.load(INDPTR + request)
    if (node >= tl.load(INDPTR + request + 1) - first) | (tl.load(CTX + request) < 0):
        return
    token = (first + node).to(tl.int64)
    split = tl.arange(0, LOADED)
    d = tl.arange(0, DP)
    at = (head // G).to(tl.int64) * packed_rows + token * G + head % G
    at = at + split * (tl.cast(packed_rows, tl.int64) * H)  # a constant if it is 1
    m = tl.load(MAXIMA + at, mask=split < SPLITS, other=float("-inf"))
    sums = tl.load(SUMS + at, mask=split < SPLITS, other=0.0)
    rows = PARTIAL + at[:, None] * DP + d[None, :]
    acc = tl.load(rows, mask=(sums != 0)[:, None], other=0.0)
    most = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(sums * weight, 0)
    out = tl.sum(acc * weight[:, None], 0) * (1.0 / tl.where(total > 0, total, 1.0))
    tl.store(OUT + token * so_t + head * so_h + d, out.to(OUT.dtype.element_ty), mask=d < D)


@dataclass(frozen=True)
class Parts:
    """Partial results of one launch: of each split, KV head and packed row the unscaled sum of
    values fp32 [DP], the largest score in base 2, and the sum of weights."""

    splits: int
    values: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, splits: int, out: torch.Tensor) -> Parts:
        """Make room for ``splits`` of ``out`` [T, H, D]; none for one split, which writes there."""
        if splits == 1:
            return cls(1, out, out, out)
        tokens, heads, d = out.shape
        rows = splits * tokens * heads
        values = out.new_empty(rows, triton.next_power_of_2(d), dtype=torch.float32)
        return cls(splits, values, *out.new_empty(2, rows, dtype=torch.float32))

    def reduce(
        self,
        out: torch.Tensor,
        ctx_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_heads: int,
        max_rows: int,
    ) -> None:
        """Add up all splits, if there are several, to `out`."""
        if self.splits == 1:
            return
        tokens, heads, d = out.shape
        group, padded = heads // kv_heads, self.values.shape[1]
        loaded = triton.next_power_of_2(self.splits)
        _reduce_splits[(max_rows, len(ctx_lens), heads)](
            out, self.values, self.maxima, self.sums, ctx_lens, qo_indptr, tokens * group,
            out.stride(0), out.stride(1), H=kv_heads, G=group, D=d, DP=padded,
            SPLITS=self.splits, LOADED=loaded, num_warps=reducing_warps(loaded * padded),
        )  # fmt: skip


def reducing_warps(elements: int) -> int:
    """Warps of a program that adds up so many elements, a power of two: 32 of each thread."""
    return max(1, min(8, elements // 1024))
