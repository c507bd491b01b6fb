"""Tree attention over vLLM's packed CPU cache."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.layout import flat, is_paired
from dyntree_kernels.cpu.path_attention import path_attention
from dyntree_kernels.cpu.simd import LANES, ROWS, as_numpy, from_float, to_float, towards_zero
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.cpu.tiles import (
    ALL,
    TILE,
    ZERO,
    attend_tile,
    begin,
    divide,
    load_tile,
    tile_views,
)
from dyntree_kernels.features import SCALES, LayerFeatures

CHUNK = 64  # limit on the query rows (tree rows times query heads of one KV head) of a task
_NO_WINDOW = np.int64(1 << 62)


@compiled
def _seen_word(bits, column):
    """Return TILE bits from `column` on. Columns before 0 are context, which every row sees."""
    if column <= -TILE:
        return ALL
    word, shift = column >> 5, np.uint32(column & 31)
    low = bits[word] if word >= 0 else ALL
    high = bits[word + 1] if word + 1 < bits.shape[0] else np.uint32(0)
    if shift == 0:
        return low
    return np.uint32((low >> shift) | (high << (np.uint32(32) - shift)))


@compiled
def _first_seen(bits, ctx, window, place, edges):
    """Fill `edges` with the first position of the context that each row sees.

    Return the least and the greatest. The position of a row is that of its last ancestor in a
    chain: it sees the context, then as many columns as it has bits. With a negative window rows see
    each other both ways, and follow one another from `place` after the context.
    """
    least, greatest = np.int64(ctx), np.int64(0)
    for i in range(bits.shape[0]):
        length = np.int64(ctx)
        if window < 0:
            length += place + i + 1
        else:
            for word in bits[i]:
                while word != 0:
                    word &= word - np.uint32(1)
                    length += 1
        edges[i] = min(max(length - abs(window), 0), ctx)
        least, greatest = min(least, edges[i]), max(greatest, edges[i])
    return least, greatest


@compiled
def seen_words(words, bits, heads, ctx, start, edges):
    """Fill `words` [rows] with the bits of the TILE positions from `start` that each row sees.

    Return the bits of those that any row sees. edges: as of `_first_seen`, or None.
    """
    seen = np.uint32(0)
    for i in range(bits.shape[0]):
        word = _seen_word(bits[i], start - ctx)
        if edges is not None:
            hidden = edges[i] - start
            if hidden >= TILE:
                word = np.uint32(0)
            elif hidden > 0:
                word &= ALL << np.uint32(hidden)
        seen |= word
        words[i * heads : (i + 1) * heads] = word
    return seen


@compiled
def _chunk_attention(
    q, keys, values, n, paired, k_steps, v_steps, table, ctx, bits, heads, out, workspace, words,
    beyond, head, place,
):  # fmt: skip
    """Compute the attention of the rows of one chunk over one KV head.

    q, out: [rows, D], one row for each tree row and each of the `heads` query heads from `head` on;
    q is scaled. A row that sees no position gets zeros. bits: [rows / heads, words]. k_steps,
    v_steps: block stride, and offset of the KV head. workspace, words: working memory. beyond:
    window, soft cap, and sinks [H], or None; either compiles a separate function. place: of the
    first row among those of its request.
    """
    rows, d = q.shape
    tile_keys, tile_values, scores, state = tile_views(workspace, rows, d)
    begin(out, state, beyond, head, heads)
    first, whole, edges = 0, 0, None
    if beyond is not None:
        edges = np.empty(bits.shape[0], np.int64)
        first, whole = _first_seen(bits, ctx, beyond[0], place, edges)
    for start in range(first // TILE * TILE, ctx + 32 * bits.shape[1], TILE):
        seen, masked = ALL, start + TILE > ctx or start < whole
        if masked:
            seen = seen_words(words, bits, heads, ctx, start, edges)
            if seen == 0:
                continue
        load_tile(
            tile_keys, tile_values, keys, values, k_steps, v_steps, table, n, start, paired, seen
        )  # fmt: skip
        attend_tile(q, tile_keys, tile_values, words, masked, beyond, scores, out, state)
    divide(out, state)


@compiled
def _multiply(rows, factor):
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] *= factor


@compiled
def load_rows(dst, q, step, first, head, heads, rows, scale):
    d = dst.shape[1]
    for i in range(rows):
        at = (first + i // heads) * step + (head + i % heads) * d
        row = q[at : at + d]
        for j in range(d):
            dst[i, j] = to_float(row[j]) * scale
    dst[rows:] = ZERO


@compiled
def store_rows(src, out, step, first, head, heads, rows, truncate):
    d = src.shape[1]
    for i in range(rows):
        at = (first + i // heads) * step + (head + i % heads) * d
        row = out[at : at + d]
        for j in range(d):
            row[j] = from_float(towards_zero(src[i, j]) if truncate else src[i, j], row[j])


@compiled(parallel=True, nogil=True)
def _tree_attention(
    q, q_step, keys, values, steps, n, d, paired, block_table, ctx_lens, qo_indptr, bits,
    kv_heads, heads, chunk, out, out_step, scales, workspace, words, beyond, truncate, by_path,
):  # fmt: skip
    """scales [2, Hkv]: factors of the scores, and of the values, of each KV head. by_path: None, or
    another value, for which a separate function is compiled."""
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
                    load_rows(
                        queries, q, q_step, first, h * heads, heads, count * heads, scales[0, h]
                    )  # fmt: skip
                    chunk_of = (
                        queries, keys, values, n, paired, (steps[0], h * steps[1]),
                        (steps[2], h * steps[3]), block_table[r], ctx,
                        bits[first : first + count], heads, result, space[2 * rows * d :],
                        words[thread], beyond, h * heads, first - qo_indptr[r],
                    )  # fmt: skip
                    if by_path is None:
                        _chunk_attention(*chunk_of)
                    else:
                        path_attention(*chunk_of)
                    if scales[1, h] != np.float32(1):
                        _multiply(result, scales[1, h])
                    store_rows(
                        result, out, out_step, first, h * heads, heads, count * heads, truncate
                    )  # fmt: skip


class PackedCache:
    """Keys and values of one layer, in the form that the kernel reads.

    The two caches are the halves into which vLLM's CPU backend splits its cache tensor, in float32,
    bfloat16, float16 or float8_e4m3fn. `isa` names their layout.

    Raises:
        ValueError: for an unsupported layout, dtype or shape.
    """

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor, isa: str) -> None:
        self.paired = is_paired(isa)
        _, self.heads, self.block_size, self.head_size = key_cache.shape
        if self.block_size % TILE or self.head_size % LANES:
            raise ValueError(
                f"block size {self.block_size} and head size {self.head_size} must be multiples "
                f"of {TILE} and {LANES}"
            )
        # numba compiles a kernel per dtype and memory order of an argument, so each has one.
        self.keys, self.values = (
            x.view(torch.uint8).numpy() if x.dtype == torch.float8_e4m3fn else as_numpy(x)
            for x in (flat(key_cache), flat(value_cache))
        )
        self.steps = (*key_cache.stride()[:2], *value_cache.stride()[:2])


class TreeAttention:
    """Computes the attention of one forward's tree rows, layer by layer.

    A layer of a small model takes tens of microseconds, so everything that layers share is prepared
    once. See `dyntree_kernels` for the arguments. Contiguous int32 tensors are not copied, so later
    writes to them take effect. With ``truncate``, results in bfloat16 are rounded towards zero,
    else to the nearest. With ``by_path``, a row's sums run in the order of positions: its bits are
    those of a plain row, and a chain's rows, too, may be more than a window has positions. A
    request of many plain rows may then be given as several of few, each with the others as context.
    """

    def __init__(
        self,
        block_table: torch.Tensor,
        ctx_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        ancestor_bits: torch.Tensor,
        *,
        truncate: bool = False,
        by_path: bool = False,
    ) -> None:
        self._truncate = truncate
        self._by_path = by_path or None
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
        read = min(self._mean_ctx, features.window or self._mean_ctx)
        threads = use_torch_threads(2 * tokens * q_heads * d // LANES * read)
        chunk = max(1, min(CHUNK // heads, tokens * kv_heads // threads))
        self._allocate(threads, -(-chunk * heads // ROWS) * ROWS, d)
        _tree_attention(
            rows_of(q), q.stride(0), cache.keys, cache.values, cache.steps, cache.block_size, d,
            cache.paired, self._block_table, self._ctx_lens, self._qo_indptr, self._bits, kv_heads,
            heads, chunk, rows_of(out), out.stride(0), _scales(features, kv_heads), self._floats,
            self._words, _beyond(features, q_heads), self._truncates(out), self._by_path,
        )  # fmt: skip

    def _truncates(self, out: torch.Tensor) -> bool:
        return self._truncate and out.dtype == torch.bfloat16

    def _allocate(self, threads: int, rows: int, d: int) -> None:
        size = rows * (2 * d + TILE + 2) + 2 * d * TILE
        if self._floats.shape != (threads, size):
            self._floats = np.empty((threads, size), np.float32)
            self._words = np.zeros((threads, rows), np.uint32)


def _beyond(
    features: LayerFeatures, heads: int
) -> tuple[np.int64, np.float32, np.ndarray[Any, Any]] | None:
    """Return the window, negative if rows see each other both ways, the soft cap and the sinks [H]
    of a layer as the kernel takes them."""
    if features.beyond <= SCALES:
        return None
    sinks = torch.full((heads,), -torch.inf) if features.sinks is None else features.sinks
    window = _NO_WINDOW if features.window is None else np.int64(features.window)
    window = -window if features.both_ways else window
    return window, np.float32(features.soft_cap or 0), sinks.detach().float().contiguous().numpy()


@cache
def _scale(scale: float, kv_heads: int) -> np.ndarray[Any, Any]:
    """Return the factors of a layer without scales of its own; the array must stay as it is."""
    found = np.ones((2, kv_heads), np.float32)
    found[0] = scale
    return found


def _scales(features: LayerFeatures, kv_heads: int) -> np.ndarray[Any, Any]:
    found = _scale(features.scale, kv_heads)
    if not features.beyond & SCALES:
        return found
    found = found.copy()
    for row, name in enumerate(("key_scale", "value_scale")):
        if (scale := features.of_heads(name, kv_heads)) is not None:
            found[row] *= scale.detach().numpy()
    return found


def rows_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
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
    *,
    truncate: bool = False,
    by_path: bool = False,
) -> None:
    """Compute the attention of tree rows over a packed CPU cache, and write it to `out`.

    See `dyntree_kernels` and `TreeAttention` for the arguments, and `PackedCache` for the caches.

    Raises:
        ValueError: for an unsupported layout, dtype or shape, or features that are not served.
    """
    rows = block_table, ctx_lens, qo_indptr, ancestor_bits
    attend = TreeAttention(*rows, truncate=truncate, by_path=by_path)
    attend(q, PackedCache(key_cache, value_cache, isa), out, features)
