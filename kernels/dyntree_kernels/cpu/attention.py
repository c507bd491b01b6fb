"""Tree attention over vLLM's packed CPU cache."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.layout import flat, is_paired
from dyntree_kernels.cpu.simd import (
    LANES,
    ROWS,
    accumulate,
    as_numpy,
    exp,
    from_float,
    row_maximum,
    to_float,
    widen,
)
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.features import LayerFeatures

_TILE = 32  # cache positions per step of the online softmax; one word is a row's mask of them
_CHUNK = 64  # limit on the query rows (tree rows times query heads of one KV head) of a task
_MASKED = np.float32(-np.inf)
_INFINITY = np.float32(np.inf)
_ZERO = np.float32(0)
_ALL = np.uint32(0xFFFFFFFF)
_UNROLLED = {"reassoc", "contract", "nsz"}  # lets sums vectorise, and keeps NaN


@compiled
def _load_keys(dst, block, n, start, paired):
    """Copy the _TILE positions from `start` of a block's keys into dst[D, _TILE]."""
    d = dst.shape[0]
    if not paired:
        for i in range(d):
            for j in range(0, _TILE, LANES):
                widen(dst, i, j, block, i * n + start + j)
        return
    for group in range(_TILE // LANES):
        base = (start // LANES + group) * d * LANES
        for pair in range(d // 2):
            row = block[base + pair * 2 * LANES : base + (pair + 1) * 2 * LANES]
            for e in range(2):
                for j in range(LANES):
                    dst[2 * pair + e, group * LANES + j] = to_float(row[2 * j + e])


@compiled
def _load_values(dst, block, n, start, paired, seen):
    """Copy the _TILE positions from `start` of a block's values into dst[_TILE, D].

    Values at positions outside the bit mask `seen` become zero. Their weight is zero, but its
    product with a value that is not finite would be NaN.
    """
    d = dst.shape[1]
    if not paired:
        for j in range(_TILE):
            for i in range(0, d, LANES):
                widen(dst, j, i, block, (start + j) * d + i)
    else:
        for group in range(d // LANES):
            base = (group * n + start) * LANES
            for pair in range(_TILE // 2):
                row = block[base + pair * 2 * LANES : base + (pair + 1) * 2 * LANES]
                for e in range(2):
                    for i in range(LANES):
                        dst[2 * pair + e, group * LANES + i] = to_float(row[2 * i + e])
    if seen != _ALL:
        for j in range(_TILE):
            if (seen >> np.uint32(j)) & np.uint32(1) == 0:
                dst[j, :] = _ZERO


@compiled
def _seen_word(bits, column):
    """Return _TILE bits from `column` on. Columns before 0 are context, which every row sees."""
    if column <= -_TILE:
        return _ALL
    word, shift = column >> 5, np.uint32(column & 31)
    low = bits[word] if word >= 0 else _ALL
    high = bits[word + 1] if word + 1 < bits.shape[0] else np.uint32(0)
    if shift == 0:
        return low
    return np.uint32((low >> shift) | (high << (np.uint32(32) - shift)))


@compiled
def _mask_scores(scores, words):
    for i in range(scores.shape[0]):
        word = words[i]
        for j in range(_TILE):
            if (word >> np.uint32(j)) & np.uint32(1) == 0:
                scores[i, j] = _MASKED


@compiled(fastmath=_UNROLLED)
def _softmax_step(scores, sums, state):
    """Turn a tile of scores into weights, and rescale the running sums to the new maxima.

    The weight of a masked score is 0. A score that is NaN makes its row NaN.
    """
    for i in range(scores.shape[0]):
        high = state[i, 0]
        found = row_maximum(scores, i)
        top = found if found > high else high
        if top > high:
            shrink = exp(high - top)
            state[i, 0] = top
            state[i, 1] *= shrink
            for j in range(sums.shape[1]):
                sums[i, j] *= shrink
        total = _ZERO
        # In a row that has seen no position yet, top is -inf, and -inf - top would be NaN.
        shift = top if top > _MASKED else _ZERO
        for j in range(_TILE):
            weight = exp(scores[i, j] - shift)
            scores[i, j] = weight
            total += weight
        state[i, 1] += total


@compiled
def _add_non_finite(out, scores, values, words):
    """Add values that are not all finite to the rows that see their positions, and clear them.

    The product of all weights and values would give NaN to rows that do not see them.
    """
    for j in range(_TILE):
        infinite = np.int32(0)
        for k in range(values.shape[1]):
            infinite += np.int32(not abs(values[j, k]) < _INFINITY)
        if infinite > 0:
            for i in range(out.shape[0]):
                if (words[i] >> np.uint32(j)) & np.uint32(1):
                    for k in range(values.shape[1]):
                        out[i, k] += scores[i, j] * values[j, k]
            values[j, :] = _ZERO


@compiled
def _chunk_attention(
    q, keys, values, n, paired, k_steps, v_steps, table, ctx, bits, heads, out, workspace, words
):
    """Compute the attention of the rows of one chunk over one KV head.

    q, out: [rows, D], one row for each tree row and each of the `heads` query heads; q is scaled. A
    row that sees no position gets zeros. bits: [rows / heads, words]. k_steps, v_steps: block
    stride, and offset of the KV head. workspace, words: working memory.
    """
    rows, d = q.shape
    tile_size = d * _TILE
    tile_keys = workspace[:tile_size].reshape(d, _TILE)
    tile_values = workspace[tile_size : 2 * tile_size].reshape(_TILE, d)
    at = 2 * tile_size
    scores = workspace[at : at + rows * _TILE].reshape(rows, _TILE)
    at += rows * _TILE
    state = workspace[at : at + 2 * rows].reshape(rows, 2)  # maximum and sum of the weights
    state[:, 0] = _MASKED
    state[:, 1] = _ZERO
    out[:, :] = _ZERO
    for start in range(0, ctx + 32 * bits.shape[1], _TILE):
        seen = _ALL
        if start + _TILE > ctx:
            seen = np.uint32(0)
            for i in range(bits.shape[0]):
                word = _seen_word(bits[i], start - ctx)
                seen |= word
                words[i * heads : (i + 1) * heads] = word
            if seen == 0:
                continue
        place = start // n
        block = np.int64(table[place]) if place < len(table) else np.int64(0)
        k_block = keys[block * k_steps[0] + k_steps[1] :]
        v_block = values[block * v_steps[0] + v_steps[1] :]
        _load_keys(tile_keys, k_block, n, start % n, paired)
        _load_values(tile_values, v_block, n, start % n, paired, seen)
        scores[:, :] = _ZERO
        accumulate(scores, q, tile_keys)
        if start + _TILE > ctx:
            _mask_scores(scores, words)
        _softmax_step(scores, out, state)
        if start + _TILE > ctx:
            _add_non_finite(out, scores, tile_values, words)
        accumulate(out, scores, tile_values)
    for i in range(rows):
        if state[i, 1] == _ZERO:
            continue  # The row sees no position.
        inverse = np.float32(1) / state[i, 1]
        for j in range(d):
            out[i, j] *= inverse


@compiled
def _load_rows(dst, q, step, first, head, heads, rows, scale):
    d = dst.shape[1]
    for i in range(rows):
        at = (first + i // heads) * step + (head + i % heads) * d
        row = q[at : at + d]
        for j in range(d):
            dst[i, j] = to_float(row[j]) * scale
    dst[rows:] = _ZERO


@compiled
def _store_rows(src, out, step, first, head, heads, rows):
    d = src.shape[1]
    for i in range(rows):
        at = (first + i // heads) * step + (head + i % heads) * d
        row = out[at : at + d]
        for j in range(d):
            row[j] = from_float(src[i, j], row[j])


@compiled(parallel=True, nogil=True)
def _tree_attention(
    q, q_step, keys, values, steps, n, d, paired, block_table, ctx_lens, qo_indptr, bits,
    kv_heads, heads, chunk, out, out_step, scale, workspace, words,
):  # fmt: skip
    threads = workspace.shape[0]
    for thread in numba.prange(threads):
        task = 0
        for r in range(ctx_lens.shape[0]):
            ctx = np.int64(ctx_lens[r])
            if ctx < 0:
                continue
            length = qo_indptr[r + 1] - qo_indptr[r]
            chunks = (length + chunk - 1) // chunk
            for number in range(chunks):
                first = qo_indptr[r] + number * length // chunks
                count = qo_indptr[r] + (number + 1) * length // chunks - first
                rows = (count * heads + ROWS - 1) // ROWS * ROWS
                for h in range(kv_heads):
                    task += 1
                    if task % threads != thread:
                        continue
                    space = workspace[thread]
                    queries = space[: rows * d].reshape(rows, d)
                    result = space[rows * d : 2 * rows * d].reshape(rows, d)
                    _load_rows(queries, q, q_step, first, h * heads, heads, count * heads, scale)
                    _chunk_attention(
                        queries, keys, values, n, paired, (steps[0], h * steps[1]),
                        (steps[2], h * steps[3]), block_table[r], ctx,
                        bits[first : first + count], heads, result, space[2 * rows * d :],
                        words[thread],
                    )  # fmt: skip
                    _store_rows(result, out, out_step, first, h * heads, heads, count * heads)


class PackedCache:
    """Keys and values of one layer, in the form that the kernel reads.

    The two caches are the halves into which vLLM's CPU backend splits its cache tensor, in float32,
    bfloat16 or float16. `isa` names their layout.

    Raises:
        ValueError: for an unsupported layout, dtype or shape.
    """

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor, isa: str) -> None:
        self.paired = is_paired(isa)
        _, self.heads, self.block_size, self.head_size = key_cache.shape
        if self.block_size % _TILE or self.head_size % LANES:
            raise ValueError(
                f"block size {self.block_size} and head size {self.head_size} must be multiples "
                f"of {_TILE} and {LANES}"
            )
        # numba compiles a kernel per dtype and memory order of an argument, so each has one.
        self.keys, self.values = as_numpy(flat(key_cache)), as_numpy(flat(value_cache))
        self.steps = (*key_cache.stride()[:2], *value_cache.stride()[:2])


class TreeAttention:
    """Computes the attention of one forward's tree rows, layer by layer.

    A layer of a small model takes tens of microseconds, so everything that layers share is prepared
    once. See `dyntree_kernels` for the arguments. Contiguous int32 tensors are not copied, so later
    writes to them take effect.
    """

    def __init__(
        self,
        block_table: torch.Tensor,
        ctx_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        ancestor_bits: torch.Tensor,
    ) -> None:
        self._block_table = block_table.int().contiguous().numpy()
        self._ctx_lens = ctx_lens.int().contiguous().numpy()
        self._qo_indptr = qo_indptr.int().contiguous().numpy()
        self._bits = ancestor_bits.contiguous().view(torch.uint32).numpy()
        self._mean_ctx = int(self._ctx_lens.sum()) // max(1, len(self._ctx_lens))
        self._floats = np.empty((0, 0), np.float32)
        self._words = np.empty((0, 0), np.uint32)

    def __call__(
        self, q: torch.Tensor, cache: PackedCache, out: torch.Tensor, features: LayerFeatures
    ) -> None:
        """Write the attention of ``q`` over a layer's cache to ``out``.

        Raises:
            ValueError: for an unsupported dtype or shape, or features that are not served.
        """
        features.check("cpu")
        (tokens, q_heads, d), kv_heads = q.shape, cache.heads
        if q.shape != out.shape or q_heads % kv_heads or d != cache.head_size:
            raise ValueError(
                f"q {tuple(q.shape)} and out {tuple(out.shape)} must both be "
                f"[T, H, {cache.head_size}] with H a multiple of the {kv_heads} KV heads"
            )
        if tokens == 0:
            return
        heads = q_heads // kv_heads
        threads = use_torch_threads(2 * tokens * q_heads * d // LANES * self._mean_ctx)
        chunk = max(1, min(_CHUNK // heads, tokens * kv_heads // threads))
        self._allocate(threads, -(-chunk * heads // ROWS) * ROWS, d)
        _tree_attention(
            _rows(q), q.stride(0), cache.keys, cache.values, cache.steps, cache.block_size, d,
            cache.paired, self._block_table, self._ctx_lens, self._qo_indptr, self._bits, kv_heads,
            heads, chunk, _rows(out), out.stride(0), np.float32(features.scale), self._floats,
            self._words,
        )  # fmt: skip

    def _allocate(self, threads: int, rows: int, d: int) -> None:
        size = rows * (2 * d + _TILE + 2) + 2 * d * _TILE
        if self._floats.shape != (threads, size):
            self._floats = np.empty((threads, size), np.float32)
            self._words = np.zeros((threads, rows), np.uint32)


def _rows(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory from the first to the last element of x [T, H, D]."""
    (tokens, heads, d), (step, *within) = x.shape, x.stride()
    if within != [d, 1]:
        raise ValueError(f"q and out must be dense within a row, but have strides {x.stride()}")
    return as_numpy(x.as_strided(((tokens - 1) * step + heads * d,), (1,)))


def tree_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    isa: str,
    block_table: torch.Tensor,
    ctx_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    ancestor_bits: torch.Tensor,
    out: torch.Tensor,
    features: LayerFeatures,
) -> None:
    """Compute the attention of tree rows over a packed CPU cache, and write it to `out`.

    See `dyntree_kernels` for the arguments, and `PackedCache` for the caches.

    Raises:
        ValueError: for an unsupported layout, dtype or shape, or features that are not served.
    """
    attend = TreeAttention(block_table, ctx_lens, qo_indptr, ancestor_bits)
    attend(q, PackedCache(key_cache, value_cache, isa), out, features)
