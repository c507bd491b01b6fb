"""Tree attention over a cache of latent vectors (multi-head latent attention), on the CPU.

A position's latent vector is its key for every query head, and the first elements of the vector are
its value: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with the projections of keys and values
absorbed into those of queries and outputs.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.attention import (
    CHUNK,
    TreeAttention,
    load_rows,
    rows_of,
    seen_words,
    store_rows,
)
from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.layout import flat
from dyntree_kernels.cpu.path_attention import path_attention
from dyntree_kernels.cpu.simd import LANES, ROWS, as_numpy
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.cpu.tiles import (
    ALL,
    TILE,
    attend_tile,
    begin,
    divide,
    load_latents,
    tile_views,
)
from dyntree_kernels.features import LayerFeatures


@compiled
def _chunk_attention(q, cache, steps, n, table, ctx, bits, heads, out, workspace, words):
    """Compute the attention of the rows of one chunk.

    q [rows, D], out [rows, V]: one row for each tree row and each of the `heads` query heads; q is
    scaled. A row that sees no position gets zeros. bits: [rows / heads, words]. workspace, words:
    working memory.
    """
    rows, d = q.shape
    columns, latents, scores, state = tile_views(workspace, rows, d)
    begin(out, state, None, 0, heads)
    for start in range(0, ctx + 32 * bits.shape[1], TILE):
        seen, masked = ALL, start + TILE > ctx
        if masked:
            seen = seen_words(words, bits, heads, ctx, start, None)
            if seen == 0:
                continue
        load_latents(columns, latents, cache, steps, n, table, start, seen)
        attend_tile(q, columns, latents, words, masked, None, scores, out, state)
    divide(out, state)


@compiled(parallel=True, nogil=True)
def _latent_attention(
    q, q_step, cache, steps, n, sizes, block_table, ctx_lens, qo_indptr, bits, heads, chunk, out,
    out_step, scale, workspace, words, truncate, by_path,
):  # fmt: skip
    threads, (d, v) = workspace.shape[0], sizes
    for thread in numba.prange(threads):
        task = 0
        for r in range(ctx_lens.shape[0]):
            if ctx_lens[r] < 0:
                continue
            length = qo_indptr[r + 1] - qo_indptr[r]
            chunks = (length + chunk - 1) // chunk
            for number in range(chunks):
                task += 1
                if task % threads != thread:
                    continue
                first = qo_indptr[r] + number * length // chunks
                count = qo_indptr[r] + (number + 1) * length // chunks - first
                rows = (count * heads + ROWS - 1) // ROWS * ROWS
                space = workspace[thread]
                queries = space[: rows * d].reshape(rows, d)
                result = space[rows * d : rows * (d + v)].reshape(rows, v)
                load_rows(queries, q, q_step, first, 0, heads, count * heads, scale)
                ctx, some = np.int64(ctx_lens[r]), bits[first : first + count]
                memory = space[rows * (d + v) :], words[thread]
                if by_path is None:
                    _chunk_attention(
                        queries, cache, steps, n, block_table[r], ctx, some, heads, result, *memory
                    )  # fmt: skip
                else:
                    path_attention(
                        queries, cache, None, n, False, steps, None, block_table[r], ctx, some,
                        heads, result, *memory, None, 0, 0,
                    )  # fmt: skip
                store_rows(result, out, out_step, first, 0, heads, count * heads, truncate)


class LatentTreeAttention(TreeAttention):
    """Computes the latent attention of one forward's tree rows, layer by layer."""

    def __call__(  # type: ignore[override]
        self, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
    ) -> None:
        """Write the attention of ``q`` over a layer's cache to ``out``.

        Args:
            q: [T, H, D], queries in the space of the latent vectors. D is a multiple of 16.
            cache: [blocks, N, D] in float32, bfloat16 or float16, with dense vectors.
            out: [T, H, V], whose V is a multiple of 16 and at most D.

        Raises:
            ValueError: for an unsupported dtype or shape, or features that it does not serve.
        """
        features.check("latent, cpu")
        (tokens, heads, d), v = q.shape, out.shape[-1]
        if out.shape[:2] != q.shape[:2] or cache.shape[-1] != d or v > d or d % LANES or v % LANES:
            raise ValueError(
                f"q {tuple(q.shape)}, out {tuple(out.shape)} and cache {tuple(cache.shape)} must "
                f"be [T, H, D], [T, H, V] and [blocks, N, D] with multiples of {LANES}, V <= D"
            )
        if cache.stride(-1) != 1:
            raise ValueError(f"vectors of the cache must be dense, but have {cache.stride()}")
        if tokens == 0:
            return
        threads = use_torch_threads(2 * tokens * heads * d // LANES * self._mean_ctx)
        chunk = max(1, min(CHUNK // heads, tokens // threads))
        self._allocate(threads, -(-chunk * heads // ROWS) * ROWS, d)
        _latent_attention(
            rows_of(q), q.stride(0), as_numpy(flat(cache)), cache.stride()[:2], cache.shape[1],
            (d, v), self._block_table, self._ctx_lens, self._qo_indptr, self._bits, heads, chunk,
            rows_of(out), out.stride(0), np.float32(features.scale), self._floats, self._words,
            self._truncates(out), self._by_path,
        )  # fmt: skip
