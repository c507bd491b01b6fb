"""Attention in Triton whose sums run in the order of positions, so that a row of a tree has the
bits of a plain row at its position, whatever else is in the tree or in the batch.

A row's tiles hold the positions that a plain row's hold: first those of the context, then the row's
ancestors from the root on. Tiles of context are shared, and so are those of chains and of requests
without a tree. In the last tiles each row of another tree has keys and values of its own. One
program computes a row from its first position to its last, in tiles of one shape, and
multiplications are not fused with additions: else masked tiles, which are compiled apart, would
round otherwise than the others.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dyntree_kernels.cuda.attention import LOG2_E, Tiling, _blocks, _check, _offsets
from dyntree_kernels.cuda.latent_attention import check_latent, latent_tiling
from dyntree_kernels.cuda.tiles import (
    accumulate,
    accumulate_latent,
    load_rows,
    without_what_is_not_finite,
)
from dyntree_kernels.features import LayerFeatures

ARITHMETIC = {"enable_fp_fusion": False}
"""Options of the compiler."""


@triton.jit
def _read_paths(BITS, PATHS, SIZES, s_bits, s_path, WORDS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    held = column < 32 * WORDS
    word = tl.load(BITS + row * s_bits + column // 32, mask=held, other=0)
    sees = (word >> (column & 31)) & 1
    place = tl.cumsum(sees, 0) - 1
    tl.store(PATHS + row * s_path + place, column, mask=sees != 0)
    tl.store(SIZES + row, tl.sum(sees, 0))


@dataclass(frozen=True)
class PathColumns:
    """For each of T rows its columns in order, int32 [T, columns], and their number, int32 [T].

    Behind so many, a row's places hold anything.
    """

    columns: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, ancestor_bits: torch.Tensor) -> PathColumns:
        """Read ancestor bits, int32 [T, words], on their device. All layers share the result."""
        rows, words = ancestor_bits.shape
        columns = ancestor_bits.new_empty(rows, 32 * words)
        found = cls(columns, ancestor_bits.new_empty(rows))
        if rows:
            _read_paths[(rows,)](
                ancestor_bits, columns, found.counts, ancestor_bits.stride(0), columns.stride(0),
                WORDS=words, WIDTH=triton.next_power_of_2(32 * words), num_warps=1,
            )  # fmt: skip
        return found


@triton.jit
def _tile(
    q, q_rotated, keys, at, seen, visible, m, total, acc, scale,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One step over the positions at `at` of the cache."""
    blame = 0.0
    v = load_rows(keys + (0 if R > 0 else D), at, seen, D, DP, MASKED)
    if MASKED:
        v, blame = without_what_is_not_finite(v.to(q.dtype))
    if R > 0:
        rotated = load_rows(keys + D, at, seen, R, R, MASKED)
        return accumulate_latent(
            q, q_rotated, v, rotated, visible, blame, m, total, acc, scale, MASKED
        )
    k = load_rows(keys, at, seen, D, DP, MASKED)
    return accumulate(q, k, v, visible, blame, m, total, acc, scale, MASKED, CAP)


@triton.jit
def _masked_tile(
    q, q_rotated, keys, table, source, visible, m, total, acc, scale, s_block, s_slot,
    PAGE: tl.constexpr, BLOCKS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """One step over positions that the cache has at `source`, of which rows see those that are
    visible."""
    seen = tl.max(visible.to(tl.int32), 0) != 0
    at = _offsets(_blocks(table, source, seen, PAGE, BLOCKS), source, s_block, s_slot, PAGE)
    return _tile(q, q_rotated, keys, at, seen, visible, m, total, acc, scale, D, DP, R, True, CAP)


@triton.jit
def _path_attention(
    Q, KV, OUT, TABLE, CTX, LENGTHS, INDPTR, PATHS, SIZES, SINKS, QUERY_SCALE, KEY_SCALE,
    VALUE_SCALE, scale, s_qs, s_ks, s_vs, sq_t, sq_h, s_block, s_head, s_slot, so_t, so_h, s_table,
    s_path,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """R: with latent attention, the elements of a key behind those that are the value; else 0."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    first = tl.load(INDPTR + request)
    nodes = tl.load(INDPTR + request + 1) - first
    ctx = tl.load(CTX + request).to(tl.int32)
    has_tree = ctx >= 0
    if LENGTHS is not None:
        ctx = tl.where(has_tree, ctx, tl.maximum(tl.load(LENGTHS + request) - nodes, 0))
    if (tile * BM >= nodes * G) | (ctx < 0):
        return

    row = tile * BM + tl.arange(0, BM)
    node = row // G
    query_head = head * G + row % G
    real = row < nodes * G
    token = first.to(tl.int64)
    rows = node * sq_t + query_head * sq_h
    # Queries may be quantised.
    q = load_rows(Q + token * sq_t, rows, real, D, DP, True).to(OUT.dtype.element_ty)
    q_rotated = q
    if R > 0:
        q_rotated = load_rows(Q + token * sq_t + D, rows, real, R, R, True).to(q.dtype)
    if QUERY_SCALE is not None:
        scale = scale * tl.load(QUERY_SCALE + head * s_qs)
    if KEY_SCALE is not None:
        scale = scale * tl.load(KEY_SCALE + head * s_ks)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    if SINKS is not None:
        m = tl.load(SINKS + query_head).to(tl.float32) * 1.4426950408889634
        total += 1.0

    # A row sees the positions from `edge` to `length`.
    of_tree = row < tl.where(has_tree, nodes * G, 0)
    count = tl.load(SIZES + token + node, mask=of_tree, other=0)
    count = tl.where(has_tree, count, node + 1)
    length = ctx + count
    edge = row * 0
    if WINDOW > 0:
        edge = tl.maximum((ctx + node + 1 if BOTH_WAYS else length) - WINDOW, 0)
    # The ancestors of a chain's rows are the first columns, so that the last one tells it.
    paths = PATHS + token * s_path
    some = of_tree & (count > 0)
    last = tl.load(paths + node * s_path + count - 1, mask=some, other=-1)
    chained = tl.max(tl.where(some & (last != count - 1), 1, 0), 0) == 0
    least = tl.min(tl.where(real, length, 2147483647), 0)
    shared = tl.where(chained, least, ctx) // BN
    lead = tl.minimum(tl.cdiv(tl.max(tl.where(real, edge, 0), 0), BN), shared)
    begin = tl.minimum(tl.min(tl.where(real, edge, 2147483647), 0) // BN, shared)
    keys = KV + head.to(tl.int64) * s_head  # heads may be the outermost dimension
    table = TABLE + request.to(tl.int64) * s_table
    column = tl.arange(0, BN)

    if WINDOW > 0:
        for j in tl.range(begin, lead, num_stages=1):
            position = j * BN + column
            visible = real[:, None] & (position[None, :] >= edge[:, None])
            m, total, acc = _masked_tile(
                q, q_rotated, keys, table, position, visible, m, total, acc, scale, s_block, s_slot,
                PAGE, BLOCKS, D, DP, R, CAP,
            )  # fmt: skip

    # These tiles need no mask. Blocks are read one tile ahead, as in `attention`.
    every = column >= 0
    position = lead * BN + column
    blocks = _blocks(table, position, position < shared * BN, PAGE, BLOCKS)
    for j in range(lead, shared):
        position = j * BN + column
        at = _offsets(blocks, position, s_block, s_slot, PAGE)
        position += BN
        blocks = _blocks(table, position, position < shared * BN, PAGE, BLOCKS)
        m, total, acc = _tile(
            q, q_rotated, keys, at, every, every, m, total, acc, scale, D, DP, R, False, CAP
        )

    # Each tile once for a chain, else once for each node of which this program has a row.
    begin_node = tile * BM // G
    here = tl.minimum(tl.cdiv((tile + 1) * BM, G), nodes) - begin_node
    parts = tl.where(chained, 1, here)
    tiles = tl.cdiv(tl.max(tl.where(real, length, 0), 0), BN) - shared
    for i in tl.range(0, tiles * parts, num_stages=1):
        position = (shared + i // parts) * BN + column
        own = begin_node + i % parts
        sees = real & ((node == own) | chained)
        visible = sees[:, None] & (position[None, :] < length[:, None])
        visible = visible & (position[None, :] >= edge[:, None])
        size = tl.where(chained, 0, tl.load(SIZES + token + own))
        of_path = (position >= ctx) & (position < ctx + size)
        on_path = tl.load(paths + own * s_path + position - ctx, mask=of_path, other=0)
        source = tl.where((position < ctx) | chained, position, ctx + on_path)
        m, total, acc = _masked_tile(
            q, q_rotated, keys, table, source, visible, m, total, acc, scale, s_block, s_slot,
            PAGE, BLOCKS, D, DP, R, CAP,
        )  # fmt: skip

    if VALUE_SCALE is not None:
        acc = acc * tl.load(VALUE_SCALE + head * s_vs)
    acc = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    d = tl.arange(0, DP)
    out = OUT + token * so_t + (node * so_t + query_head * so_h)[:, None] + d[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


def path_tiling(head_size: int, element_size: int) -> Tiling:
    """Tiles for any number of rows, since others would sum otherwise.

    They have few rows, because the last tiles are computed for each node of theirs. They do not
    spill on sm_90 and sm_100.
    """
    if head_size > 256 or element_size == 4:
        return Tiling(16, 16 if element_size == 4 else 32, 8, 2)
    return Tiling(16, 32 if head_size > 128 else 64, 4, 3)


def path_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    ctx_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    paths: PathColumns,
    out: torch.Tensor,
    features: LayerFeatures,
    *,
    seq_lens: torch.Tensor | None = None,
    max_rows: int | None = None,
    tiles: Tiling | None = None,
) -> None:
    """Attention of tree rows, and of plain ones, in the order of positions.

    The arguments that are not listed are those of `attention.tree_attention`. If the rows of
    ``out`` are shorter than queries, the cache has latent vectors [blocks, 1, N, V + R], as for
    `latent_attention.latent_tree_attention`.

    Args:
        paths: of the ancestor bits. Of requests without a tree they are not read.
        seq_lens: int32 [R]: positions of each request with its rows, which are the last ones. With
            them requests whose context length is -1 are computed as well: each of their rows sees
            the ones before.

    Raises:
        ValueError: for shapes or strides that the kernel does not read, or features that it does
            not serve.
    """
    (tokens, heads, d), v, (kv_heads, page) = q.shape, out.shape[-1], kv_cache.shape[1:3]
    if v < d:
        features.check("latent, triton")
        check_latent(q, kv_cache[:, 0], out, paths.columns)
        tile = tiles or latent_tiling(1, kv_cache.element_size())
    else:
        features.check("triton, by path")
        _check(q, kv_cache, paths.columns, out, d)
        tile = tiles or path_tiling(d, kv_cache.element_size())
    if tokens == 0:
        return
    group = heads // kv_heads
    row_tiles = triton.cdiv(min(max_rows or tokens, tokens) * group, tile.block_m)
    scales = [features.of_heads(f"{name}_scale", kv_heads) for name in ("query", "key", "value")]
    _path_attention[(row_tiles, kv_heads, len(ctx_lens))](
        q, kv_cache, out, block_table, ctx_lens, seq_lens, qo_indptr, paths.columns, paths.counts,
        features.sinks, *scales, features.scale * LOG2_E,
        *(0 if each is None else each.stride(0) for each in scales), q.stride(0), q.stride(1),
        *kv_cache.stride()[:3], out.stride(0), out.stride(1), block_table.stride(0),
        paths.columns.stride(0), G=group, D=v, DP=triton.next_power_of_2(v), R=d - v, PAGE=page,
        BLOCKS=block_table.shape[1], BM=tile.block_m, BN=tile.block_n,
        WINDOW=features.window or 0, CAP=(features.soft_cap or 0.0) * LOG2_E,
        BOTH_WAYS=bool(features.both_ways), num_warps=tile.warps,
        num_stages=tile.stages_on(q.device), **ARITHMETIC,
    )  # fmt: skip
