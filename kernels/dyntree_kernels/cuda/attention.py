"""Tree attention over vLLM's paged cache in Triton: one kernel, no compiler, any tree.

Query heads that share a KV head are rows of one tile, so the context is read once per group. The
context needs no mask. Behind it come the tree's columns in tiles of `block_n`; the ancestor bits of
a tile's rows say which of them any row sees, and the others are skipped without touching the cache
(block-sparse tree attention of DySpec, arXiv 2410.11744). Nodes in heavy-path order leave the
fewest tiles.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dyntree_kernels.cuda.splits import Parts, store_part, tiles_of_a_split
from dyntree_kernels.cuda.tiles import (
    accumulate,
    load_rows,
    row_bits,
    without_what_is_not_finite,
)
from dyntree_kernels.features import LayerFeatures

LOG2_E = 1.4426950408889634
MAX_TILES = 64
"""Tree tiles per request, one bit of an int64 each."""
SMALL_TILES = 320
"""Packed rows up to which tiles have at most 64 rows. With 68, 132 and 260 packed rows these took
19 to 37 % less time on an H200 than tiles of 128 (`benchmarks/results/kernels-h200.json`)."""


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _blocks(TABLE, position, wanted, PAGE: tl.constexpr, BLOCKS: tl.constexpr):
    held = wanted & (position < BLOCKS * PAGE)
    return tl.load(TABLE + position // PAGE, mask=held, other=0)


@triton.jit
def _offsets(blocks, position, s_block, s_slot, PAGE: tl.constexpr):
    return blocks.to(tl.int64) * s_block + (position % PAGE) * s_slot


@triton.jit
def _used_tiles(
    BITS, first, nodes, s_bits, words, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    NODES: tl.constexpr, WORDS: tl.constexpr, tile,
):  # fmt: skip
    """Bit j: some row of query tile `tile` sees a column of tree tile j."""
    node = tile * BM // G + tl.arange(0, NODES)
    word = tl.arange(0, WORDS)
    wanted = (node < nodes)[:, None] & (word < words)[None, :]
    bits = tl.load(BITS + (first + node)[:, None] * s_bits + word[None, :], mask=wanted, other=0)
    seen = tl.reduce(bits, 0, _or) != 0
    one = tl.full([WORDS], 1, tl.int64)
    return tl.reduce(tl.where(seen, one << (word * 32 // BN), 0), 0, _or)


@triton.jit
def _tree_attention(
    Q, KV, OUT, PARTIAL, PARTIAL_M, PARTIAL_L, TABLE, CTX, INDPTR, BITS, LSE, SINKS, QUERY_SCALE,
    KEY_SCALE, VALUE_SCALE, scale, s_qs, s_ks, s_vs, words, packed_rows, sq_t, sq_h, s_block,
    s_head, s_slot, so_t, so_h, s_table, s_bits, sl_t, sl_h,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2) // SPLITS
    split = tl.program_id(2) % SPLITS
    first = tl.load(INDPTR + request)
    nodes = tl.load(INDPTR + request + 1) - first
    ctx = tl.load(CTX + request).to(tl.int32)
    if (tile * BM >= nodes * G) | (ctx < 0):
        return

    row = tile * BM + tl.arange(0, BM)
    node = row // G
    query_head = head * G + row % G
    real = row < nodes * G
    token = first.to(tl.int64)
    q = load_rows(Q + token * sq_t, node * sq_t + query_head * sq_h, real, D, DP, True)
    q = q.to(OUT.dtype.element_ty)  # queries may be quantised
    if QUERY_SCALE is not None:
        scale = scale * tl.load(QUERY_SCALE + head * s_qs)
    if KEY_SCALE is not None:
        scale = scale * tl.load(KEY_SCALE + head * s_ks)

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VP], tl.float32)
    if SINKS is not None:
        sink = tl.load(SINKS + query_head).to(tl.float32) * 1.4426950408889634
        m = tl.where(split == 0, sink, m)
        total += tl.where(split == 0, 1.0, 0.0)
    context_tiles = ctx // BN
    tail = tl.where(ctx % BN != 0, 1, 0)
    if LSE is not None:
        # The context has been read, unless there is none.
        read = row < tl.where(ctx > 0, nodes * G, 0)
        m = tl.load(LSE + token * sl_t + (node * sl_t + query_head * sl_h), mask=read,
                    other=float("-inf")) * 1.4426950408889634  # fmt: skip
        total = tl.where(read, 1.0, 0.0)
        acc = load_rows(OUT + token * so_t, node * so_t + query_head * so_h, read, V, VP, True)
        acc = acc.to(tl.float32)
        context_tiles = context_tiles * 0
        tail = tail * 0

    used = _used_tiles(BITS, first, nodes, s_bits, words, BM, BN, G, NODES, WORDS, tile)
    # Context tiles from `lead` on need no mask. Before them come those with the edges of a window.
    edge = row * 0
    begin = context_tiles * 0
    lead = context_tiles * 0
    if WINDOW > 0:
        if BOTH_WAYS:
            length = ctx + node + 1
        else:
            length = ctx + row_bits(BITS, token, node, real, s_bits, words, BM)
        edge = tl.where(real, tl.minimum(tl.maximum(length - WINDOW, 0), ctx), ctx)
        begin = tl.min(edge, 0) // BN
        lead = tl.minimum(tl.cdiv(tl.max(tl.where(real, edge, 0), 0), BN), context_tiles)
    plain = context_tiles - lead
    masked = lead - begin + tail
    tiles = plain + masked + tl.cdiv(words * 32, BN)
    share = tiles_of_a_split(tiles, SPLITS)
    lo = split * share
    hi = tl.minimum(lo + share, tiles)
    keys = KV + head.to(tl.int64) * s_head  # heads may be the outermost dimension
    table = TABLE + request.to(tl.int64) * s_table
    column = tl.arange(0, BN)

    # A tile's blocks are read one tile ahead: the copies of its keys and values would otherwise
    # wait for them, and none would be in flight while the tile before is multiplied.
    every = column >= 0
    last = tl.minimum(hi, plain)
    position = (lead + lo) * BN + column
    blocks = _blocks(table, position, position < (lead + last) * BN, PAGE, BLOCKS)
    if LSE is None:
        for j in range(lo, last):
            position = (lead + j) * BN + column
            at = _offsets(blocks, position, s_block, s_slot, PAGE)
            k = load_rows(keys, at, every, D, DP, False)
            v = load_rows(keys + D, at, every, V, VP, False)
            position += BN
            blocks = _blocks(table, position, position < (lead + last) * BN, PAGE, BLOCKS)
            m, total, acc = accumulate(q, k, v, every, 0.0, m, total, acc, scale, False, CAP)

    # Masked tiles of the context have negative numbers: leading ones, then what is left of it.
    start = plain + masked
    for j in tl.range(tl.maximum(lo, plain) - start, hi - start, num_stages=1):
        if (j < 0) | (((used >> tl.maximum(j, 0)) & 1) != 0):
            c = j * BN + column
            of_tree = (c >= 0) & (c < words * 32)
            bits = tl.load(
                BITS + token * s_bits + (node * s_bits)[:, None] + (c // 32)[None, :],
                mask=real[:, None] & of_tree[None, :],
                other=0,
            )
            number = tl.where(j + tail < 0, lead + j + tail, context_tiles)
            position = tl.where(j < 0, number * BN + column, ctx + c)
            in_context = (position < ctx)[None, :]
            if WINDOW > 0:
                in_context = in_context & (position[None, :] >= edge[:, None])
            sees = ((bits >> (c & 31)[None, :]) & 1) | in_context.to(tl.int32)
            seen = tl.max(sees, 0) != 0
            blocks = _blocks(table, position, seen, PAGE, BLOCKS)
            at = _offsets(blocks, position, s_block, s_slot, PAGE)
            v = load_rows(keys + D, at, seen, V, VP, True)
            v, blame = without_what_is_not_finite(v.to(q.dtype))
            k = load_rows(keys, at, seen, D, DP, True)
            m, total, acc = accumulate(q, k, v, sees != 0, blame, m, total, acc, scale, True, CAP)

    if VALUE_SCALE is not None:
        acc = acc * tl.load(VALUE_SCALE + head * s_vs)
    if SPLITS > 1:
        # Partial results lie in packed row order, so that their place needs no division.
        part = (split * H + head).to(tl.int64) * packed_rows + first * G + tile * BM
        store_part(PARTIAL, PARTIAL_M, PARTIAL_L, part, real, m, total, acc, BM, VP)
    else:
        acc = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        d = tl.arange(0, VP)
        out = OUT + token * so_t + (node * so_t + query_head * so_h)[:, None] + d[None, :]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=real[:, None] & (d < V)[None, :])


@dataclass(frozen=True)
class Tiling:
    """Launch parameters: rows of a tile, its columns (32 or 64), warps and pipeline stages.

    With three stages the copies of one tile are in flight while another is multiplied, with two
    they are not. ``shared``: bytes of shared memory that three take, if some GPUs have less.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    shared: int = 0

    def stages_on(self, device: torch.device) -> int:
        """Return the stages that the shared memory of a device holds."""
        return self.stages if self.shared <= _shared_memory(device) else 2


def tiling(head_size: int, rows: int, element_size: int) -> Tiling:
    """Tiles for `rows` packed rows per request and KV head.

    With 16-bit caches and head groups of a power of two they do not spill on sm_90.
    """
    padded = triton.next_power_of_2(head_size)
    if padded > 256:
        return Tiling(32, 32, 8, 2)
    if element_size == 4 or padded > 128:
        if element_size == 4:
            return Tiling(32 if rows <= 32 else 64, 32, 4 if rows <= 32 else 8, 2)
        return Tiling(32, 32, 4, 3) if rows <= 32 else Tiling(64, 32, 8, 3, 129 << 10)
    largest = 64 if rows <= SMALL_TILES else 128
    return half_precision_tiling(next((size for size in (16, 32) if rows <= size), largest))


def half_precision_tiling(block_m: int) -> Tiling:
    """A tile of 16, 32, 64 or 128 rows, of 16-bit caches and head sizes up to 128."""
    return Tiling(block_m, 64, 8 if block_m == 128 else 4, 3)


def nodes_per_tile(block_m: int, group: int) -> int:
    """The most nodes whose rows, `group` each, share a tile of `block_m` rows."""
    return block_m // group if block_m % group == 0 else (block_m + group - 2) // group + 1


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def tree_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
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
    context_lse: torch.Tensor | None = None,
) -> None:
    """Attention of tree rows over a paged cache, written to `out`.

    The arguments that are not listed are those of `dyntree_kernels`. Lengths, trees and tables are
    read on the device: a captured graph stays valid when their contents change.

    Args:
        kv_cache: [blocks, Hkv, N, D + V] in any physical order with the last dimension dense, keys
            before values. Quantised queries and caches are converted to the type of `out`.
        out: [T, H, V]. V is D unless the layer's ``value_size`` says otherwise.
        max_rows: no request has more rows, and tiles are made for as many, however many there are.
            Default: T, which launches programs that do nothing.
        splits: programs that share the columns of a tile; 1 makes the order of the sums
            independent of the batch. Default: as many as fill the device.
        context_lse: fp32 [H, T], the natural logarithm of the sum of exponentials of each row's
            scores with its context, if `out` already holds the attention to the context: the tree
            is added to it, in one split. Requests without a context may hold anything.

    Raises:
        ValueError: for shapes or strides that the kernel does not read, or features that it does
            not serve.
    """
    features.check("triton")
    tokens, heads, d = q.shape
    kv_heads, page = kv_cache.shape[1:3]
    values = features.value_size or d
    _check(q, kv_cache, ancestor_bits, out, values)
    if tokens == 0:
        return
    group, requests, words = heads // kv_heads, len(ctx_lens), ancestor_bits.shape[1]
    max_rows = max_rows or tokens
    tile = tiles or tiling(d, max_rows * group, kv_cache.element_size())
    max_rows = min(max_rows, tokens)
    if words * 32 > MAX_TILES * tile.block_n:
        limit = MAX_TILES * tile.block_n
        raise ValueError(f"{words * 32} tree columns, at most {limit} are served")
    grid = triton.cdiv(max_rows * group, tile.block_m), kv_heads, requests
    packed_rows, sl_h, sl_t = tokens * group, 0, 0
    if context_lse is not None:
        # Nothing reads the packed rows: one number less that Triton compiles kernels for.
        splits, packed_rows, (sl_h, sl_t) = 1, 0, context_lse.stride()
    elif splits is None:
        splits = max(1, min(32, 2 * _processors(q.device) // (grid[0] * grid[1] * grid[2])))
    parts = Parts.of(splits, out)
    scales = [features.of_heads(f"{name}_scale", kv_heads) for name in ("query", "key", "value")]
    _tree_attention[(grid[0], grid[1], requests * splits)](
        q, kv_cache, out, parts.values, parts.maxima, parts.sums, block_table, ctx_lens, qo_indptr,
        ancestor_bits, context_lse, features.sinks, *scales, features.scale * LOG2_E,
        *(0 if each is None else each.stride(0) for each in scales), words, packed_rows,
        q.stride(0), q.stride(1),
        *kv_cache.stride()[:3], out.stride(0), out.stride(1), block_table.stride(0),
        ancestor_bits.stride(0), sl_t, sl_h, H=kv_heads, G=group, D=d,
        DP=triton.next_power_of_2(d), V=values, VP=triton.next_power_of_2(values), SPLITS=splits,
        PAGE=page,
        BLOCKS=block_table.shape[1], BM=tile.block_m, BN=tile.block_n,
        NODES=triton.next_power_of_2(nodes_per_tile(tile.block_m, group)),
        WORDS=triton.next_power_of_2(words), WINDOW=features.window or 0,
        CAP=(features.soft_cap or 0.0) * LOG2_E, BOTH_WAYS=bool(features.both_ways),
        num_warps=tile.warps, num_stages=tile.stages_on(q.device),
    )  # fmt: skip
    parts.reduce(out, ctx_lens, qo_indptr, kv_heads, max_rows)


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    ancestor_bits: torch.Tensor,
    out: torch.Tensor,
    values: int,
) -> None:
    tokens, heads, d = q.shape
    if kv_cache.dim() != 4 or kv_cache.shape[3] != d + values or heads % kv_cache.shape[1]:
        raise ValueError(
            f"kv_cache {tuple(kv_cache.shape)} must be [blocks, Hkv, N, {d + values}] with Hkv a "
            f"divisor of the {heads} heads of q"
        )
    if out.shape != (tokens, heads, values):
        raise ValueError(
            f"out {tuple(out.shape)} must be [{tokens}, {heads}, {values}], as q {tuple(q.shape)}"
        )
    if any(x.stride(-1) != 1 for x in (q, out, kv_cache, ancestor_bits)):
        raise ValueError("the last dimension of q, out, kv_cache and ancestor_bits must be dense")
    if ancestor_bits.dtype != torch.int32 or ancestor_bits.shape[0] < tokens:
        raise ValueError(
            f"ancestor_bits {ancestor_bits.dtype} {tuple(ancestor_bits.shape)} must be int32 "
            f"[{tokens}, words]"
        )
