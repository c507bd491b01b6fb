"""Best-first growth on the device: three launches between draft forwards, and one at the end.

Expansion 0 is the root's, expansion 1 + c that of the node in scratch column c; candidate
``e * K + k`` is the k-th child of expansion e, so candidates stand behind their parents. As a
child is never worth more than its parent, the N most valuable candidates, in descending order and
of equals the earlier first, are a tree whose parents stand before their children.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dyntree_kernels.gpu.gumbel import rank_blocks
from dyntree_kernels.growth import RowBuffers, TreeArrays

_NONE = tl.constexpr(float("-inf"))
_MOST = tl.constexpr(20.0)  # a logit of 20 is a chance of 1 within float32
_SUREST = tl.constexpr(-1e-7)


@triton.jit
def _logit(p):
    """Of log probabilities p below 0, without the cancellation of 1 - exp(p)."""
    near = -p * (1 + p / 2 * (1 + p / 3 * (1 + p / 4 * (1 + p / 5 * (1 + p / 6)))))
    rest = tl.where(p > -0.1, near, 1 - tl.exp(p))
    return tl.minimum(p - tl.log(rest), _MOST)


@triton.jit
def _children(
    TOKENS, EDGES, FEATURES, BEST_TOKENS, BEST_SCORES, SUMS, WEIGHTS, CLASSES, CHAINED,
    first, width, expansions, blocks, ranked,
    BLOCKS: tl.constexpr, RANKED: tl.constexpr, KEPT: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, CALIBRATED: tl.constexpr,
):  # fmt: skip
    """One row's best children of all blocks of the vocabulary, and what the estimate says."""
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    block = tl.arange(0, BLOCKS)
    sums = tl.load(SUMS + row * blocks + block, mask=block < blocks, other=_NONE)
    top = tl.max(sums, 0)
    total = top + tl.log(tl.sum(tl.exp(sums - top), 0))

    at = tl.arange(0, RANKED)
    scores = tl.load(BEST_SCORES + row * ranked + at, mask=at < ranked, other=_NONE)
    names = tl.load(BEST_TOKENS + row * ranked + at, mask=at < ranked, other=0)
    lane = tl.arange(0, KP)
    best = tl.full([KP], _NONE, tl.float32)
    tokens = tl.zeros([KP], tl.int64)
    for k in tl.static_range(KEPT):
        score = tl.max(scores, 0)
        place = tl.min(tl.where(scores == score, at, RANKED), 0)
        best = tl.where(lane == k, score, best)
        tokens = tl.where(lane == k, tl.sum(tl.where(at == place, names, 0), 0), tokens)
        scores = tl.where(at == place, _NONE, scores)

    edges = best - total
    out = (request * expansions + first + row % width) * K + lane
    wanted = lane < K
    if CALIBRATED:
        p = tl.minimum(tl.maximum(edges, -_MOST), _SUREST)
        leading = tl.sum(tl.where(lane == 0, p, 0.0), 0)
        second = tl.sum(tl.where(lane == 1, p, 0.0), 0)
        logit = _logit(p)
        margin = tl.where(lane == 0, leading - second, p - leading)
        margin = tl.minimum(tl.maximum(margin, -_MOST), _MOST)
        tl.store(FEATURES + out * 2, logit, mask=wanted)
        tl.store(FEATURES + out * 2 + 1, margin, mask=wanted)
        w = WEIGHTS + tl.load(CLASSES + request) * 3
        x = tl.load(w) + tl.load(w + 1) * logit + tl.load(w + 2) * margin
        learned = tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))
        edges = tl.where(best == _NONE, _NONE, learned)
    chained = tl.load(CHAINED + request).to(tl.int32)
    edges = tl.where(lane * chained > 0, _NONE, edges)
    # A row whose scores hold NaN, or nothing but -inf, has no children.
    edges = tl.where(tl.abs(total) < float("inf"), edges, _NONE)
    tl.store(EDGES + out, edges, mask=wanted)
    tl.store(TOKENS + out, tokens, mask=wanted)


@triton.jit
def _values(BASES, EDGES, request, expansions, added, least, K: tl.constexpr, CP: tl.constexpr):
    """Of a request's candidates below the first ``added`` expansions, -inf where there is none."""
    candidate = tl.arange(0, CP)
    there = candidate < added * K
    base = tl.load(BASES + request * expansions + candidate // K, mask=there, other=_NONE)
    edge = tl.load(EDGES + request * expansions * K + candidate, mask=there, other=_NONE)
    value = tl.where((base == _NONE) | (edge != edge), _NONE, base + edge)
    return tl.where((value < least) & (candidate > 0), _NONE, value)


@triton.jit
def _expand(
    BASES, EDGES, TOKENS, NODES, DEPTHS, SEEN, OPENED, ROOTS, SCRATCH, IDS, ROW_POSITIONS, ROW_BITS,
    ROW_SLOTS, first, expansions, budget, least, longest, words, groups, s_scratch, s_slots,
    W: tl.constexpr, K: tl.constexpr, CP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Choose the nodes of expansions ``first`` to ``first + W`` and write their draft rows."""
    request = tl.program_id(0).to(tl.int64)
    candidate, word = tl.arange(0, CP), tl.arange(0, WORDS)
    value = _values(BASES, EDGES, request, expansions, first, least, K, CP)
    opened = OPENED + request * expansions * K + candidate
    inside = candidate < expansions * K
    closed = (first == 1) | (tl.load(opened, mask=inside, other=1) == 0)
    root = tl.load(ROOTS + request)
    columns = expansions - 1
    room = tl.minimum(longest - root, columns)
    for w in range(W):
        open_value = tl.where(closed, value, _NONE)
        best = tl.max(open_value, 0)
        node = tl.min(tl.where(open_value == best, candidate, CP), 0)
        closed = closed & (candidate != node)
        # Of a node that so many are worth as much as, no child would be in the tree.
        as_much = tl.sum((value >= best).to(tl.int32), 0)
        column = first + w - 1
        exists = (best > _NONE) & (best >= least) & (as_much < budget) & (column < room)
        above = request * expansions + node // K
        at = request * expansions + first + w
        depth = tl.load(DEPTHS + above) + 1
        token = tl.load(TOKENS + request * expansions * K + node, mask=exists, other=0)
        own = tl.where(word == column // 32, tl.full([], 1, tl.int32) << (column % 32), 0)
        bits = tl.load(SEEN + above * words + word, mask=word < words, other=0) | own
        bits = tl.where(exists, bits, 0)
        tl.store(NODES + at, node.to(tl.int64))
        tl.store(DEPTHS + at, depth)
        tl.store(BASES + at, tl.where(exists, best, _NONE))
        tl.store(SEEN + at * words + word, bits, mask=word < words)
        row = request * W + w
        tl.store(IDS + row, token.to(tl.int32))
        tl.store(ROW_POSITIONS + row, tl.minimum(root + depth, longest))
        tl.store(ROW_BITS + row * words + word, bits, mask=word < words)
        for group in range(groups):
            slot = tl.load(SCRATCH + group * s_scratch + request * columns + column)
            tl.store(ROW_SLOTS + group * s_slots + row, tl.where(exists, slot, -1))
    tl.store(opened, (closed == 0).to(tl.int8), mask=inside)


@triton.jit
def _store(
    NODE_TOKENS, PARENTS, NODE_DEPTHS, VALUES, COUNTS, ADMITTED, GROWN, ANCESTORS, NODE_FEATURES,
    SLOTS, BASES, EDGES, TOKENS, FEATURES, NODES, DEPTHS, RANKS, added, expansions, budget, least,
    words,
    K: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    CALIBRATED: tl.constexpr,
):  # fmt: skip
    """Write one request's tree of the most valuable candidates at its slot."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + request)
    candidate = tl.arange(0, CP)
    value = _values(BASES, EDGES, request, expansions, added, least, K, CP)
    grown = tl.sum((value > _NONE).to(tl.int32), 0)
    count = tl.minimum(grown, budget)
    tl.store(COUNTS + slot, count.to(tl.int64))
    tl.store(ADMITTED + slot, count.to(tl.int64))
    tl.store(GROWN + slot, grown.to(tl.int64))

    rank, left = tl.full([CP], -1, tl.int32), value
    for place in range(count):
        node = tl.min(tl.where(left == tl.max(left, 0), candidate, CP), 0)
        rank = tl.where(candidate == node, place, rank)
        left = tl.where(candidate == node, _NONE, left)
    ranks = RANKS + request * expansions * K
    tl.store(ranks + candidate, rank, mask=candidate < expansions * K)
    tl.debug_barrier()
    kept = rank >= 0
    expansion = request * expansions + candidate // K
    above = tl.load(NODES + expansion, mask=kept & (candidate >= K), other=0)
    parent = tl.load(ranks + above, mask=kept & (candidate >= K), other=-1)
    to = slot * budget + rank
    depth = tl.load(DEPTHS + expansion, mask=kept, other=0) + 1
    token = tl.load(TOKENS + request * expansions * K + candidate, mask=kept, other=0)
    tl.store(PARENTS + to, parent.to(tl.int64), mask=kept)
    tl.store(NODE_DEPTHS + to, depth, mask=kept)
    tl.store(VALUES + to, value, mask=kept)
    tl.store(NODE_TOKENS + request * budget + rank, token, mask=kept)
    if CALIBRATED:
        features = FEATURES + (request * expansions * K + candidate) * 2
        for i in tl.static_range(2):
            seen = tl.load(features + i, mask=kept, other=0.0)
            tl.store(NODE_FEATURES + to * 2 + i, seen, mask=kept)

    row, word = tl.arange(0, ROWS), tl.arange(0, WORDS)
    padding = (row >= count) & (row < budget)
    tl.store(PARENTS + slot * budget + row, tl.full([ROWS], -1, tl.int64), mask=padding)
    tl.store(NODE_DEPTHS + slot * budget + row, tl.full([ROWS], 1, tl.int64), mask=padding)
    tl.store(VALUES + slot * budget + row, tl.full([ROWS], _NONE, tl.float32), mask=padding)
    tl.store(NODE_TOKENS + request * budget + row, tl.zeros([ROWS], tl.int64), mask=padding)
    tl.debug_barrier()
    # Every node climbs to the root, which is row and bit 0. Requests that only fill a batch up
    # share a slot: whatever of theirs is found there, parents stand before their children.
    bits = tl.zeros([ROWS, WORDS], tl.int32)
    at = tl.where(row <= budget, row, -1)
    while tl.max(at, 0) >= 0:
        own = tl.full([ROWS], 1, tl.int32) << (at & 31)
        here = (word[None, :] == (at // 32)[:, None]) & (at >= 0)[:, None]
        bits |= tl.where(here, own[:, None], 0)
        higher = tl.load(PARENTS + slot * budget + at - 1, mask=at > 0, other=-2)
        at = higher.to(tl.int32) + 1
    out = ANCESTORS + (slot * (budget + 1) + row)[:, None] * words + word[None, :]
    tl.store(out, bits, mask=(row <= budget)[:, None] & (word < words)[None, :])


class DeviceGrowth:
    """Grows trees step by step as growth ``topk`` does, for as many requests as there is room.

    Call ``start``, then ``pick`` and ``expand`` in turn, then ``finish``.
    """

    def __init__(
        self,
        *,
        requests: int,
        node_budget: int,
        children: int,
        widths: tuple[int, ...],
        least: float,
        longest: int,
        coupled: bool,
        weights: torch.Tensor | None,
        rows: RowBuffers,
        trees: TreeArrays,
    ) -> None:
        """``requests``: the most. ``least``: the least value of a node but the root's first child.
        ``longest``: the last position. ``coupled``: whether scores have the target sampler's noise.
        ``weights`` float32 [classes, 3]: of the learned chance, followed as they change; None where
        it is not learned. ``rows`` and ``trees`` are written."""
        self._budget, self._children = node_budget, children
        self._widths, self._coupled = widths, coupled
        self._least = math.log(least) if least > 0 else -math.inf
        self._longest, self._weights, self._rows, self._trees = longest, weights, rows, trees
        self._expansions = 1 + sum(widths)
        self._lanes = triton.next_power_of_2(self._expansions * children)
        # A single warp needs no barrier to find the best of its lanes.
        self._warps = 1 if self._lanes <= 512 else 4
        self._words = max(1, -(-sum(widths) // 32))
        of, device = (requests, self._expansions), rows.ids.device
        # The root's entries stay as they are here.
        self._bases = torch.zeros(of, device=device)
        self._nodes, self._depths = torch.zeros(2, *of, dtype=torch.int64, device=device)
        self._seen = torch.zeros(*of, self._words, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(*of, children, dtype=torch.int64, device=device)
        self._edges = torch.zeros(*of, children, device=device)
        self._features = torch.zeros(*of, children, 2, device=device)
        self._opened = torch.zeros(*of, children, dtype=torch.int8, device=device)
        self._ranks = torch.zeros(*of, children, dtype=torch.int32, device=device)
        self._of_requests: tuple[torch.Tensor, ...] = ()
        self._new = (0, 1)
        self._forward = self._added = 0

    def start(
        self,
        roots: torch.Tensor,
        temperatures: torch.Tensor,
        classes: torch.Tensor,
        seeds: torch.Tensor,
        chained: torch.Tensor,
    ) -> None:
        """Begin a step's growth over R requests; [R] each, dense.

        ``roots`` int64: positions. ``temperatures`` float32, ``classes`` int64 of the weights,
        ``seeds`` int64. ``chained`` bool: requests whose nodes have one child.
        """
        self._of_requests = (roots, temperatures, classes, seeds, chained)
        self._new, self._forward, self._added = (0, 1), 0, 0

    def pick(self, logits: torch.Tensor) -> None:
        """Take the children of the last expansions from their logits [R * W, V].

        Raises:
            ValueError: for another number of rows.
        """
        roots, temperatures, classes, seeds, chained = self._of_requests
        first, last = self._new
        width = last - first
        if logits.shape[0] != len(roots) * width:
            raise ValueError(f"logits of {logits.shape[0]} rows for {len(roots)} x {width}")
        positions = self._rows.positions if first else roots
        kept = min(max(2, self._children), logits.shape[1])
        tokens, scores, sums = rank_blocks(
            logits, temperatures, seeds, positions, kept, coupled=self._coupled, width=width
        )
        blocks, self._added = sums.shape[1], last
        weights = self._edges if self._weights is None else self._weights
        _children[(logits.shape[0],)](
            self._tokens, self._edges, self._features, tokens, scores, sums, weights, classes,
            chained, first, width, self._expansions, blocks, blocks * kept,
            BLOCKS=triton.next_power_of_2(blocks), RANKED=triton.next_power_of_2(blocks * kept),
            KEPT=kept, K=self._children, KP=triton.next_power_of_2(max(kept, self._children)),
            CALIBRATED=self._weights is not None, num_warps=1 if blocks < 16 else 4,
        )  # fmt: skip

    def expand(self, ancestor_bits: torch.Tensor) -> None:
        """Choose the nodes of the next draft forward and write its rows.

        ``ancestor_bits`` int32 [R * W, words]: written, bits over the scratch columns.
        """
        roots, width = self._of_requests[0], self._widths[self._forward]
        first = self._new[1]
        self._new, self._forward = (first, first + width), self._forward + 1
        rows = self._rows
        _expand[(len(roots),)](
            self._bases, self._edges, self._tokens, self._nodes, self._depths, self._seen,
            self._opened, roots, rows.scratch, rows.ids, rows.positions, ancestor_bits, rows.slots,
            first, self._expansions, self._budget, self._least, self._longest,
            self._words, rows.slots.shape[0], rows.scratch.stride(0), rows.slots.stride(0),
            W=width, K=self._children, CP=self._lanes, WORDS=triton.next_power_of_2(self._words),
            num_warps=self._warps,
        )  # fmt: skip

    @property
    def frontier_values(self) -> torch.Tensor:
        """Log of the values of the nodes that ``expand`` chose, float32 [R, W], -inf for none."""
        return self._bases[: len(self._of_requests[0]), slice(*self._new)]

    def finish(self, slots: torch.Tensor) -> torch.Tensor:
        """Store the trees at ``slots`` int64 [R]; their nodes' tokens, int64 [R, N]."""
        trees, requests = self._trees, len(slots)
        words = trees.ancestors.shape[2]
        tokens = torch.empty(requests, self._budget, dtype=torch.int64, device=slots.device)
        _store[(requests,)](
            tokens, *trees, slots, self._bases, self._edges, self._tokens, self._features,
            self._nodes, self._depths, self._ranks, self._added, self._expansions, self._budget,
            self._least, words,
            K=self._children, CP=self._lanes,
            ROWS=triton.next_power_of_2(self._budget + 1), WORDS=triton.next_power_of_2(words),
            CALIBRATED=self._weights is not None, num_warps=4,
        )  # fmt: skip
        return tokens
