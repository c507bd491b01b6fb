"""Best-first growth on the device: three launches between draft forwards, and two at the end.

Tries take one more launch at the start.

Expansion 0 is the root's, expansion 1 + c that of the node in scratch column c. The first T
candidates are the nodes of a trie, if there is one, and candidate ``T + e * K + k`` is the k-th
child of expansion e, so candidates follow their parents. As a child is never worth more than
its parent, the N most valuable candidates, in descending order and of equals the earlier first, are
a tree whose parents stand before their children. All shapes are known on the host, and all memory
stays where it is, so that a CUDA graph can hold it.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dyntree_kernels.contracts import GrowthSettings, StepGrowth, expansions_of
from dyntree_kernels.cuda.children import merge, warps_for
from dyntree_kernels.cuda.drawn import draw_children
from dyntree_kernels.cuda.grafts import Candidates, GraftArrays, Judging, graft, see
from dyntree_kernels.cuda.gumbel import rank_blocks
from dyntree_kernels.cuda.stored import expansion_of, store
from dyntree_kernels.tries import Trie

_RANKED = 32  # candidates that one program ranks, and rows whose nodes it stores
_AGAINST = 128  # candidates that they are compared with at a time


@triton.jit
def _choose(
    VALUES, OPEN, ABOVE, EXPANSIONS, trie, known, width, budget, least,
    WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, GRAFTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the `width` most valuable candidates that were not expanded, and their values.

    They are -1 and -inf from the first candidate on that could not have children in the tree.
    Rows with a SHIFT read what their parents' rows made, so the parents must have been expanded;
    only a trie's nodes are known before.
    """
    candidate, place = tl.arange(0, CANDIDATES), tl.arange(0, WIDTH)
    inside = candidate < known
    values = tl.load(VALUES + candidate, mask=inside, other=float("-inf"))
    open = tl.load(OPEN + candidate, mask=inside, other=float("-inf"))
    if GRAFTS and SHIFT:
        above = tl.load(ABOVE + trie + candidate, mask=candidate < GRAFTS, other=-1)
        expansion = tl.load(EXPANSIONS + trie + above, mask=above >= 0, other=0)
        open = tl.where(expansion >= 0, open, float("-inf"))
    nodes = tl.full([WIDTH], -1, tl.int32)
    bases = tl.full([WIDTH], float("-inf"), tl.float32)
    for at in range(width):
        value, node = tl.max(open, 0, return_indices=True)
        open = tl.where(candidate == node, float("-inf"), open)
        # As many as the budget are worth at least as much where a child would not be in the tree.
        fits = tl.sum((values >= value).to(tl.int32), 0) < budget
        fits = fits & (value > float("-inf")) & (value >= least)
        nodes = tl.where(place == at, tl.where(fits, node, -1), nodes)
        bases = tl.where(place == at, tl.where(fits, value, float("-inf")), bases)
    return nodes, bases


@triton.jit
def _place_rows(
    POSITIONS, ROW_POSITIONS, ROW_ABOVE, ABOVE, EXPANSIONS, row, at, above, own, trie, nodes,
    exists, inside, GRAFTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Write the positions `at` of the rows' tokens; with a SHIFT also those of the rows, and the
    expansions of their parents.

    `above`: these expansions, but for nodes of a trie. `own`, `trie`: where the expansions and the
    trie of the request begin.
    """
    tl.store(POSITIONS + row, at, mask=inside)
    if SHIFT:
        tl.store(ROW_POSITIONS + row, at + SHIFT, mask=inside)
        if GRAFTS:
            grafted = exists & (nodes < GRAFTS)
            parent = tl.load(ABOVE + trie + nodes, mask=grafted, other=-1)
            expansion = tl.load(EXPANSIONS + trie + parent, mask=parent >= 0, other=0)
            above = tl.where(grafted, own + expansion, above)
        tl.store(ROW_ABOVE + row, above, mask=inside)


@triton.jit
def _expand(
    VALUES, OPEN, TOKENS, NODES, BASES, LEVELS, BITS, ABOVE, GRAFT_DEPTHS, EXPANSIONS, ROOTS,
    SCRATCH, IDS, POSITIONS, ROW_POSITIONS, ROW_ABOVE, ROW_BITS, SLOTS,
    first, width, expansions, words, budget, longest, groups, s_scratch, s_slots, least,
    K: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, CANDIDATES: tl.constexpr,
    GRAFTS: tl.constexpr, LANES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Choose one request's nodes for the expansions from `first` on, and write their rows.

    A row without a node sees nothing, and its slot is -1.
    """
    request = tl.program_id(0).to(tl.int64)
    own, trie = request * expansions, request * GRAFTS
    candidates = trie + own * K
    nodes, bases = _choose(
        VALUES + candidates, OPEN + candidates, ABOVE, EXPANSIONS, trie, GRAFTS + first * K, width,
        budget, least, WIDTH, CANDIDATES, GRAFTS, SHIFT,
    )  # fmt: skip
    tl.store(OPEN + candidates + nodes, float("-inf"), mask=nodes >= 0)

    place = tl.arange(0, WIDTH)
    inside, column = place < width, first - 1 + place
    root = tl.load(ROOTS + request)
    exists = (nodes >= 0) & (column < longest - root)
    above = own + tl.where(exists, expansion_of(nodes, K, GRAFTS), 0)
    level = tl.load(LEVELS + above, mask=inside, other=0) + 1
    if GRAFTS:
        grafted = exists & (nodes < GRAFTS)
        depth = tl.load(GRAFT_DEPTHS + trie + nodes, mask=grafted, other=0)
        level = tl.where(grafted, depth.to(tl.int64), level)
    out, row = own + first + place, request * width + place
    tl.store(NODES + out, tl.where(exists, nodes, -1).to(tl.int64), mask=inside)
    tl.store(BASES + out, tl.where(exists, bases, float("-inf")), mask=inside)
    tl.store(LEVELS + out, level, mask=inside)

    token = tl.load(TOKENS + candidates + nodes, mask=exists, other=0)
    tl.store(IDS + row, token.to(tl.int32), mask=inside)
    _place_rows(
        POSITIONS, ROW_POSITIONS, ROW_ABOVE, ABOVE, EXPANSIONS, row,
        tl.minimum(root + level, longest), above, own, trie, nodes, exists, inside, GRAFTS, SHIFT,
    )  # fmt: skip
    scratch = SCRATCH + request * (expansions - 1) + column
    for group in range(groups):
        slot = tl.load(scratch + group * s_scratch, mask=exists, other=-1)
        tl.store(SLOTS + group * s_slots + row, slot, mask=inside)

    word = tl.arange(0, WORDS)
    seen = exists[:, None] & (word < words)[None, :]
    bits = tl.load(BITS + above[:, None] * words + word[None, :], mask=seen, other=0)
    bit = tl.full([WIDTH], 1, tl.int32) << (column & 31)
    here = seen & (word[None, :] == (column >> 5)[:, None])
    bits |= tl.where(here, bit[:, None], 0)
    if GRAFTS:
        bits = see(
            bits, nodes, grafted, first + place, ABOVE, EXPANSIONS, trie, GRAFTS, LANES, WORDS
        )
    written = inside[:, None] & (word < words)[None, :]
    tl.store(BITS + out[:, None] * words + word[None, :], bits, mask=written)
    tl.store(ROW_BITS + row[:, None] * words + word[None, :], bits, mask=written)


@triton.jit
def _first_of_root(VALUES, K: tl.constexpr, GRAFTS: tl.constexpr, LANES: tl.constexpr):
    """Return the best child of a request's root, which is its most valuable candidate."""
    best = 0
    if GRAFTS:
        candidate = tl.arange(0, LANES)
        values = tl.load(VALUES + candidate, mask=candidate < GRAFTS + K, other=float("-inf"))
        _, best = tl.max(values, 0, return_indices=True)
    return best


@triton.jit
def _rank_of(VALUES, candidate, known, least, best):
    """Return the values of candidates; -inf for a candidate that no tree contains.

    `best` is in a tree whatever it is worth.
    """
    values = tl.load(VALUES + candidate, mask=candidate < known, other=float("-inf"))
    return tl.where((values >= least) | (candidate == best), values, float("-inf"))


@triton.jit
def _order(
    VALUES, BEST, BECAME, COUNTS, ADMITTED, GROWN, STORED_AT, known, capacity, budget, least,
    RANKED: tl.constexpr, AGAINST: tl.constexpr, NODES: tl.constexpr,
    K: tl.constexpr, GRAFTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rank some of a request's candidates by value.

    BEST [R, budget] gets the best ones, BECAME [R, capacity] the node of each, or -1 for none.
    """
    request = tl.program_id(0).to(tl.int64)
    values = VALUES + request * capacity
    candidate = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    best = _first_of_root(values, K, GRAFTS, LANES)
    rank = _rank_of(values, candidate, known, least, best)
    before = tl.zeros([RANKED], tl.int32)
    grown = tl.full([], 0, tl.int32)
    for start in range(0, known, AGAINST):
        other = start + tl.arange(0, AGAINST)
        others = _rank_of(values, other, known, least, best)
        grown += tl.sum((others > float("-inf")).to(tl.int32), 0)
        earlier = other[None, :] < candidate[:, None]
        ahead = (others[None, :] > rank[:, None]) | ((others[None, :] == rank[:, None]) & earlier)
        before += tl.sum(ahead.to(tl.int32), 1)
    kept = (rank > float("-inf")) & (before < budget)
    tl.store(BEST + request * budget + before, candidate.to(tl.int64), mask=kept)
    became = BECAME + request * capacity + candidate
    tl.store(became, tl.where(kept, before, -1).to(tl.int64), mask=candidate < known)
    if tl.program_id(1) == 0:
        slot = tl.load(STORED_AT + request)
        count = tl.minimum(grown, budget)
        tl.store(COUNTS + slot, count.to(tl.int64))
        tl.store(ADMITTED + slot, count.to(tl.int64))
        tl.store(GROWN + slot, grown.to(tl.int64))
        node = tl.arange(0, NODES)
        tl.store(BEST + request * budget + node, -1, mask=(node >= count) & (node < budget))


class DeviceGrowth(StepGrowth):
    """`StepGrowth` in a few launches on the device."""

    def __init__(self, settings: GrowthSettings) -> None:
        of_requests, rows, trees = settings.of_requests, settings.rows, settings.trees
        requests, device = len(of_requests.roots), trees.parents.device
        children, nodes_of_tries, weights = settings.children, settings.grafts, settings.weights
        expansions = 1 + sum(settings.widths)
        self._every = self._of_requests = of_requests
        self._rows, self._trees, self._weights = rows, trees, weights
        self._widths, self._children, self._expansions = settings.widths, children, expansions
        self._budget, self._nodes_of_tries = settings.node_budget, nodes_of_tries
        self._max_depth, self._longest = settings.max_depth, settings.longest
        self._coupled, self._shift = settings.coupled, settings.shift
        # Of the tokens of the last forward's rows, at which the noise of their children is.
        self._positions = torch.zeros_like(rows.above) if self._shift else rows.positions
        self._least = math.log(settings.least) if settings.least > 0 else -math.inf
        self.candidates = Candidates.room(
            requests, nodes_of_tries + expansions * children, weights is not None, device
        )
        """At addresses that never change."""
        self._grafts = GraftArrays.room(requests, nodes_of_tries, self.candidates)
        # Of every expansion: the candidate that it expands, its value, depth and ancestors. Those
        # of the root stay 0.
        self._nodes = torch.full((requests, expansions), -1, dtype=torch.int64, device=device)
        self._bases = torch.zeros(requests, expansions, device=device)
        self._levels = torch.zeros_like(self._nodes)
        self._words = max(1, -(-(expansions - 1) // 32))
        self._bits = torch.zeros(
            requests, expansions, self._words, dtype=torch.int32, device=device
        )
        self._best = torch.full((requests, self._budget), -1, dtype=torch.int64, device=device)
        self._became = torch.full_like(self.candidates.tokens, -1)
        self._drawing = settings.drawing
        self._numbers = torch.arange(expansions, device=device)[:, None]
        # Of the draws of every expansion; and by how much they change the logs of chances.
        self._seeds = torch.zeros(expansions, requests, dtype=torch.int64, device=device)
        self._changes = torch.zeros(requests, expansions, children, device=device)
        self._forward = 0
        # The expansions that children come of next, and how many have children.
        self._new, self._picked = (0, 1), 0

    def start(self, requests: int) -> None:
        self.resume(requests, 0)
        of, drawing = self._of_requests, self._drawing
        if drawing is not None:
            self._seeds[:, :requests].copy_(drawing.seeds(of.seeds, self._numbers))
            if drawing.chains:
                of.chained.logical_or_(of.temperatures > 0)
        if self._grafts.edges is not None:
            self._grafts.edges[:requests].fill_(-math.inf)

    def graft(self, trie: Trie) -> None:
        of = self._of_requests
        if self._drawing is not None:  # a trie's nodes are no draws
            of = of._replace(chained=of.chained | (of.temperatures > 0))
        graft(
            trie, of, self._weights, self.candidates, self._grafts,
            children=self._children, max_depth=self._max_depth, coupled=self._coupled,
        )  # fmt: skip

    def resume(self, requests: int, forwards: int) -> None:
        self._of_requests = self._every.first(requests)
        self._forward, self._new = forwards, expansions_of(self._widths, forwards)
        self._picked = self._new[1]

    def pick(self, logits: torch.Tensor) -> None:
        roots, temperatures, classes, seeds, chained, levels, _ = self._of_requests
        first, end = self._new
        width, kept = end - first, self._children
        if len(logits) != len(roots) * width:
            raise ValueError(f"logits of {len(logits)} rows for {len(roots)} x {width}")
        if self._weights is not None:
            kept = min(max(2, kept), logits.shape[1])
        if self._drawing is not None:
            kept = max(kept, self._drawing.distributions.tokens.shape[2])
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        positions = roots if first == 0 else self._positions
        ranked = rank_blocks(
            logits, temperatures, seeds, positions, kept, coupled=self._coupled, width=width
        )
        judging = Judging()
        if self._nodes_of_tries:
            judging = Judging(logits, temperatures, seeds, positions)
        merge(
            ranked, self._bases, classes, chained, self._weights, self._new, self._children,
            self.candidates, self._grafts, judging, self._levels, levels,
            max_depth=self._max_depth, coupled=self._coupled,
        )  # fmt: skip
        if self._drawing is not None:
            draw_children(
                ranked, self._of_requests, self._seeds, self._weights, self._drawing.distributions,
                self.candidates, (self._bases, self._nodes, self._levels), self._changes,
                self._new, children=self._children, grafts=self._nodes_of_tries,
                max_depth=self._max_depth,
            )  # fmt: skip
        self._picked = end

    def expand(self, ancestor_bits: torch.Tensor) -> None:
        roots, rows, first = self._of_requests.roots, self._rows, self._new[1]
        requests, grafts = len(roots), self._nodes_of_tries
        tokens, values, opened, _ = self.candidates
        width = self._widths[self._forward]
        self._forward += 1
        self._new = (first, first + width)
        candidates = triton.next_power_of_2(grafts + first * self._children)
        if requests:
            _expand[(requests,)](
                values, opened, tokens, self._nodes, self._bases, self._levels, self._bits,
                self._grafts.above, self._grafts.depths, self._grafts.expansions, roots,
                rows.scratch, rows.ids, self._positions,
                *((rows.positions, rows.above) if self._shift else (None, None)), ancestor_bits,
                rows.slots, first, width, self._expansions, self._words, self._budget,
                self._longest, len(rows.slots), rows.scratch.stride(0), rows.slots.stride(0),
                self._least, K=self._children, WIDTH=triton.next_power_of_2(width),
                WORDS=triton.next_power_of_2(self._words), CANDIDATES=candidates,
                GRAFTS=grafts, LANES=triton.next_power_of_2(grafts), SHIFT=self._shift,
                num_warps=warps_for(candidates),
            )  # fmt: skip

    @property
    def frontier_values(self) -> torch.Tensor:
        return self._bases[: len(self._of_requests.roots), slice(*self._new)]

    def finish(self) -> torch.Tensor:
        slots, budget, trees = self._of_requests.slots, self._budget, self._trees
        requests = len(slots)
        of_nodes, values, _, features = self.candidates
        tokens = torch.empty(requests, budget, dtype=torch.int64, device=slots.device)
        grafts, children = self._nodes_of_tries, self._children
        known, words = grafts + self._picked * children, trees.ancestors.shape[2]
        if not requests:
            return tokens
        _order[(requests, triton.cdiv(known, _RANKED))](
            values, self._best, self._became, trees.counts, trees.admitted, trees.grown, slots,
            known, values.shape[1], budget, self._least, RANKED=_RANKED, AGAINST=_AGAINST,
            NODES=triton.next_power_of_2(budget), K=children, GRAFTS=grafts,
            LANES=triton.next_power_of_2(grafts + children), num_warps=4,
        )  # fmt: skip
        store[(requests, triton.cdiv(budget + 1, _RANKED))](
            tokens, trees.parents, trees.depths, trees.values, trees.ancestors, trees.features,
            trees.kinds if grafts else None, trees.forwards, slots, values, of_nodes, features,
            self._grafts.kinds, self._nodes, self._levels, self._best, self._became,
            self._grafts.above, self._grafts.depths, self._expansions, budget, words,
            self._max_depth - 1 if grafts else self._forward, K=children,
            FEATURED=self._weights is not None, ROWS=_RANKED,
            WORDS=triton.next_power_of_2(words), GRAFTS=grafts, SHIFT=self._shift, num_warps=4,
        )  # fmt: skip
        if self._drawing is not None:
            self._drawing.origins[slots] = (self._best[:requests] - grafts) // children
        return tokens
