"""Tree attention over a paged cache of latent vectors (multi-head latent attention), in Triton.

All query heads are rows of one tile, and a tile of vectors is read once: for the scores whole, and
for the values without its last R elements. The rest is as in `cuda.attention`.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.cuda.attention import (
    LOG2_E,
    MAX_TILES,
    Tiling,
    _blocks,
    _offsets,
    _processors,
    _used_tiles,
    nodes_per_tile,
)
from dyntree_kernels.cuda.splits import Parts, store_part, tiles_of_a_split
from dyntree_kernels.cuda.tiles import accumulate_latent, load_rows, without_what_is_not_finite
from dyntree_kernels.features import LayerFeatures


@triton.jit
def _latent_attention(
    Q, CACHE, OUT, PARTIAL, PARTIAL_M, PARTIAL_L, TABLE, CTX, INDPTR, BITS, QUERY_SCALE,
    KEY_SCALE, VALUE_SCALE, scale, words, packed_rows, sq_t, sq_h, s_block, s_slot, so_t, so_h,
    s_table, s_bits,
    G: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    request = tl.program_id(1) // SPLITS
    split = tl.program_id(1) % SPLITS
    first = tl.load(INDPTR + request)
    nodes = tl.load(INDPTR + request + 1) - first
    ctx = tl.load(CTX + request).to(tl.int32)
    if (tile * BM >= nodes * G) | (ctx < 0):
        return

    row = tile * BM + tl.arange(0, BM)
    node = row // G
    head = row % G
    real = row < nodes * G
    token = first.to(tl.int64)
    rows = node * sq_t + head * sq_h
    # Queries may be quantised.
    q = load_rows(Q + token * sq_t, rows, real, V, V, True).to(OUT.dtype.element_ty)
    q_rotated = load_rows(Q + token * sq_t + V, rows, real, R, R, True).to(q.dtype)
    if QUERY_SCALE is not None:
        scale = scale * tl.load(QUERY_SCALE)
    if KEY_SCALE is not None:
        scale = scale * tl.load(KEY_SCALE)

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, V], tl.float32)
    context_tiles = ctx // BN
    start = context_tiles + tl.where(ctx % BN != 0, 1, 0)
    used = _used_tiles(BITS, first, nodes, s_bits, words, BM, BN, G, NODES, WORDS, tile)
    tiles = start + tl.cdiv(words * 32, BN)
    share = tiles_of_a_split(tiles, SPLITS)
    lo = split * share
    hi = tl.minimum(lo + share, tiles)
    table = TABLE + request.to(tl.int64) * s_table
    column = tl.arange(0, BN)

    every = column >= 0
    last = tl.minimum(hi, context_tiles)
    position = lo * BN + column
    blocks = _blocks(table, position, position < last * BN, PAGE, BLOCKS)
    for j in range(lo, last):
        position = j * BN + column
        at = _offsets(blocks, position, s_block, s_slot, PAGE)
        v = load_rows(CACHE, at, every, V, V, False)
        rotated = load_rows(CACHE + V, at, every, R, R, False)
        position += BN
        blocks = _blocks(table, position, position < last * BN, PAGE, BLOCKS)
        m, total, acc = accumulate_latent(
            q, q_rotated, v, rotated, every, 0.0, m, total, acc, scale, False
        )

    # What is left of the context is a separate tile, numbered -1, before the tree's.
    for j in tl.range(tl.maximum(lo, context_tiles) - start, hi - start, num_stages=1):
        if (j < 0) | (((used >> tl.maximum(j, 0)) & 1) != 0):
            c = j * BN + column
            of_tree = (c >= 0) & (c < words * 32)
            bits = tl.load(
                BITS + token * s_bits + (node * s_bits)[:, None] + (c // 32)[None, :],
                mask=real[:, None] & of_tree[None, :],
                other=0,
            )
            position = tl.where(j < 0, context_tiles * BN + column, ctx + c)
            sees = ((bits >> (c & 31)[None, :]) & 1) | (position < ctx).to(tl.int32)[None, :]
            seen = tl.max(sees, 0) != 0
            blocks = _blocks(table, position, seen, PAGE, BLOCKS)
            at = _offsets(blocks, position, s_block, s_slot, PAGE)
            v = load_rows(CACHE, at, seen, V, V, True)
            v, blame = without_what_is_not_finite(v.to(q.dtype))
            rotated = load_rows(CACHE + V, at, seen, R, R, True)
            m, total, acc = accumulate_latent(
                q, q_rotated, v, rotated, sees != 0, blame, m, total, acc, scale, True
            )

    if VALUE_SCALE is not None:
        acc = acc * tl.load(VALUE_SCALE)
    if SPLITS > 1:
        part = split.to(tl.int64) * packed_rows + first * G + tile * BM
        store_part(PARTIAL, PARTIAL_M, PARTIAL_L, part, real, m, total, acc, BM, V)
    else:
        acc = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        out = OUT + token * so_t + (node * so_t + head * so_h)[:, None] + tl.arange(0, V)[None, :]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=real[:, None])


def latent_tiling(rows: int, element_size: int) -> Tiling:
    """Tiles for `rows` packed rows per request, of vectors as long as DeepSeek's.

    With caches of 16 and of 8 bits they do not spill on sm_90 and sm_100.
    """
    # With quantised caches 32 rows take 102 KiB of shared memory; some GPUs have 99.
    if element_size != 2:
        return Tiling(16, 32, 8, 1)
    return Tiling(16, 32, 8, 3) if rows <= 16 else Tiling(32, 32, 8, 3, 110 << 10)


def latent_tree_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    ctx_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    ancestor_bits: torch.Tensor,
    out: torch.Tensor,
    features: LayerFeatures,
    *,
    max_rows: int | None = None,
    splits: int | None = None,
    tiles: Tiling | None = None,
) -> None:
    """Latent attention of tree rows over a paged cache, written to `out`.

    The arguments that are not listed are those of `cuda.attention.tree_attention`.

    Args:
        q: [T, H, V + R], queries in the space of the latent vectors; V and R are powers of two of
            at least 16.
        cache: [blocks, N, V + R] with dense vectors. Quantised queries and caches are converted to
            the type of `out`.
        out: [T, H, V].

    Raises:
        ValueError: for shapes or strides that the kernel does not read, or features that it does
            not serve.
    """
    features.check("latent, triton")
    check_latent(q, cache, out, ancestor_bits)
    (tokens, heads, _), v, words = q.shape, out.shape[-1], ancestor_bits.shape[1]
    r = q.shape[-1] - v
    if tokens == 0:
        return
    max_rows = min(max_rows or tokens, tokens)
    tile = tiles or latent_tiling(max_rows * heads, cache.element_size())
    if words * 32 > MAX_TILES * tile.block_n:
        limit = MAX_TILES * tile.block_n
        raise ValueError(f"{words * 32} tree columns, at most {limit} are served")
    requests, row_tiles = len(ctx_lens), triton.cdiv(max_rows * heads, tile.block_m)
    if splits is None:
        splits = max(1, min(32, 2 * _processors(q.device) // (row_tiles * requests)))
    parts = Parts.of(splits, out)
    _latent_attention[(row_tiles, requests * splits)](
        q, cache, out, parts.values, parts.maxima, parts.sums, block_table, ctx_lens, qo_indptr,
        ancestor_bits, features.query_scale, features.key_scale, features.value_scale,
        features.scale * LOG2_E, words, tokens * heads, q.stride(0), q.stride(1),
        *cache.stride()[:2], out.stride(0), out.stride(1), block_table.stride(0),
        ancestor_bits.stride(0), G=heads, V=v, R=r, PAGE=cache.shape[1],
        BLOCKS=block_table.shape[1], BM=tile.block_m, BN=tile.block_n,
        NODES=triton.next_power_of_2(nodes_per_tile(tile.block_m, heads)),
        WORDS=triton.next_power_of_2(words), SPLITS=splits, num_warps=tile.warps,
        num_stages=tile.stages_on(q.device),
    )  # fmt: skip
    parts.reduce(out, ctx_lens, qo_indptr, 1, max_rows)


def check_latent(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, *dense: torch.Tensor
) -> None:
    """Raise ValueError for shapes or strides that a kernel does not read."""
    d, v = q.shape[-1], out.shape[-1]
    if (
        out.shape[:2] != q.shape[:2]
        or cache.shape[-1] != d
        or any(x < 16 or x & (x - 1) for x in (v, d - v))
        or any(x.stride(-1) != 1 for x in (q, out, cache, *dense))
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, out {tuple(out.shape)} and cache {tuple(cache.shape)} must be "
            "[T, H, V + R], [T, H, V] and [blocks, N, V + R] with powers of two from 16 on, and "
            "their last dimension dense"
        )
