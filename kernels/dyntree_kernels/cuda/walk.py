"""Accept the paths that the target's samples follow, in one launch on the device.

`tests/reference/match.py` has the same rule in plain torch. One program holds one request's tree
in its registers: all nodes first compare their token with the sample at their parent, and then the
walk needs no memory.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dyntree_kernels.contracts import (
    ADMITTED,
    AT_DEPTH,
    DEEPEST,
    GROWN,
    KINDS,
    MOVED,
    OF_KIND,
    VERIFIED,
    BatchRows,
    TreeArrays,
    Walked,
    check_walk,
    walked_arrays,
)

_GROWN, _ADMITTED = tl.constexpr(GROWN), tl.constexpr(ADMITTED)
_VERIFIED, _DEEPEST = tl.constexpr(VERIFIED), tl.constexpr(DEEPEST)
_MOVED, _OF_KIND = tl.constexpr(MOVED), tl.constexpr(OF_KIND)
_KINDS, _AT_DEPTH = tl.constexpr(KINDS), tl.constexpr(AT_DEPTH)

_PER_WARP = 64  # nodes
_PAIRS_PER_WARP = 1024  # of a level and a node, that are added up at a time


@triton.jit
def _path(parents, node, max_depth, NODES: tl.constexpr, LEVELS: tl.constexpr):
    """Return the path from the root along `parents`, -1 after its last node, and its length."""
    level = tl.arange(0, LEVELS)
    path = tl.full([LEVELS], -1, tl.int32)
    length, at = 0, -1
    # Nobody's parent is NODES.
    while (length < max_depth) & (at < NODES):
        at = tl.min(tl.where(parents == at, node, NODES), 0)
        found = at < NODES
        path = tl.where((level == length) & found, at, path)
        length += found.to(tl.int32)
    return path, length


@triton.jit
def _report(
    OUT, FORWARDS, grown, admitted, values, levels, kinds, accepted, nodes, path, count,
    max_depth, RANKED: tl.constexpr, NODES: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the counts of one tree to its report, in the columns of `Report`.

    FORWARDS: those of the tree's nodes. accepted: the kinds of the nodes on `path`.
    """
    node = tl.arange(0, NODES)
    chances = tl.exp(values.to(tl.float64))
    if RANKED:
        ranks = OUT + _AT_DEPTH + 3 * max_depth
        tl.store(ranks + node, chances, mask=node < nodes)
        forwards = tl.load(FORWARDS + node, mask=node < nodes, other=0)
        tl.store(ranks + nodes + node, forwards.to(tl.float64), mask=node < nodes)
    depths = tl.where(node < count, levels, 0)
    every = tl.arange(0, LEVELS)
    moved = (path >= 0) & (path != every)
    tl.store(OUT + _GROWN, grown.to(tl.float64))
    tl.store(OUT + _ADMITTED, admitted.to(tl.float64))
    tl.store(OUT + _VERIFIED, count.to(tl.float64))
    tl.store(OUT + _DEEPEST, tl.max(depths, 0).to(tl.float64))
    tl.store(OUT + _MOVED, tl.sum(moved.to(tl.int32), 0).to(tl.float64))
    for kind in tl.static_range(_KINDS):
        alike = (node < count) & (kinds == kind)
        at = OUT + _OF_KIND + kind
        tl.store(at, tl.sum(alike.to(tl.int32), 0).to(tl.float64))
        tl.store(at + _KINDS, tl.sum(tl.where(alike, chances, 0.0), 0))
    of_path = OUT + _AT_DEPTH + 2 * max_depth + every
    tl.store(of_path, accepted.to(tl.float64), mask=every < max_depth)
    for first in range(0, max_depth, TILE):
        level = first + tl.arange(0, TILE)
        here = depths[None, :] == level[:, None] + 1
        out, inside = OUT + _AT_DEPTH + level, level < max_depth
        number = tl.sum(here.to(tl.int32), 1)
        tl.store(out, number.to(tl.float64), mask=inside)
        estimated = tl.sum(tl.where(here, chances[None, :], 0.0), 1)
        tl.store(out + max_depth, estimated, mask=inside)


@triton.jit
def _walk(
    REQUESTS, SAMPLED, IDS, ROW_POSITIONS, SEQ_LENS, FORBIDDEN,
    PARENTS, DEPTHS, VALUES, STORED, ADMITTED, GROWN, KINDS, FORWARDS,
    PATH, TOKENS, ROOTS, POSITIONS, COUNTS, EMITTED, REJECTED, REPORT,
    s_requests, s_report, nodes, max_depth, GRAMMAR: tl.constexpr,
    RANKED: tl.constexpr, NODES: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    own = REQUESTS + request * s_requests
    slot, first = tl.maximum(tl.load(own), 0), tl.maximum(tl.load(own + 1), 0)
    drafts, root = tl.maximum(tl.load(own + 2), 0), tl.maximum(tl.load(own + 3), 0)
    prefill_len = tl.maximum(tl.load(own + 4), 0)
    position = tl.load(ROW_POSITIONS + root)
    # A tree that was proposed while the prompt was incomplete starts from a token that was never
    # sampled; a tree may have been cut short, and its first nodes are a tree.
    room = tl.where(position >= prefill_len, drafts, 0)
    count = tl.minimum(room, tl.load(STORED + slot)).to(tl.int32)

    node, level = tl.arange(0, NODES), tl.arange(0, LEVELS)
    scheduled, real = (node < drafts) & (node < nodes), node < count
    at = slot * nodes + node
    parents = tl.load(PARENTS + at, mask=scheduled, other=-1).to(tl.int32)
    depths = tl.load(DEPTHS + at, mask=node < nodes, other=0).to(tl.int32)
    values = tl.load(VALUES + at, mask=node < nodes, other=float("-inf"))
    kinds = tl.load(KINDS + at, mask=real, other=-1)
    grown, admitted = tl.load(GROWN + slot), tl.load(ADMITTED + slot)
    carried = tl.load(IDS + root + 1 + node, mask=scheduled, other=-1)
    drawn = tl.load(SAMPLED + first + 1 + parents, mask=real, other=-2)
    agrees = real & (carried == drawn)
    if GRAMMAR:
        agrees &= tl.load(FORBIDDEN + first + 1 + node, mask=real, other=1) == 0
    parents = tl.where(agrees, parents, -2)
    path, length = _path(parents, node, max_depth, NODES, LEVELS)

    # The last token of a prompt that is incomplete is no output.
    complete = tl.load(SEQ_LENS + request) >= prefill_len
    emitted = tl.where(complete, length + 1, 0)
    rejected = tl.where(complete, drafts.to(tl.int32) + 1 - emitted, 0)
    inside = level < max_depth
    tokens = TOKENS + request * (max_depth + 1)
    tl.store(tokens, tl.load(SAMPLED + first))
    along = tl.load(SAMPLED + first + 1 + path, mask=inside, other=0)
    tl.store(tokens + 1 + level, along, mask=inside)
    tl.store(PATH + request * max_depth + level, path.to(tl.int64), mask=inside)
    tl.store(ROOTS + request, root)
    tl.store(POSITIONS + request, position)
    tl.store(COUNTS + request, count.to(tl.int64))
    tl.store(EMITTED + request, emitted)
    tl.store(REJECTED + request, rejected)

    accepted = tl.load(KINDS + slot * nodes + path, mask=path >= 0, other=-1)
    _report(
        REPORT + request * s_report, FORWARDS + slot * nodes, grown, admitted, values, depths,
        kinds, accepted, nodes, path, count, max_depth, RANKED, NODES, LEVELS, TILE,
    )  # fmt: skip


def tiling(nodes: int, levels: int) -> tuple[int, int]:
    """Return the number of warps, and of levels that are summed at a time; for powers of two."""
    warps = max(1, min(16, nodes // _PER_WARP))
    return warps, max(1, min(levels, _PAIRS_PER_WARP * warps // nodes))


def walk(batch: BatchRows, trees: TreeArrays, found: Walked, *, ranked: bool) -> None:
    """Walk as in `Walk`."""
    check_walk(batch, trees, found)
    requests, nodes = batch.requests.shape[0], trees.parents.shape[1]
    if not requests:
        return
    max_depth = found.path.shape[1]
    lanes, levels = triton.next_power_of_2(nodes), triton.next_power_of_2(max_depth)
    warps, tile = tiling(lanes, levels)
    _walk[(requests,)](
        *batch, *walked_arrays(trees), *found, batch.requests.stride(0), found.report.shape[1],
        nodes, max_depth, GRAMMAR=batch.forbidden is not None, RANKED=ranked, NODES=lanes,
        LEVELS=levels, TILE=tile, num_warps=warps,
    )  # fmt: skip
