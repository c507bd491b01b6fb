"""Grow trees best-first in three compiled calls: pick children, expand, and store the trees.

Expansion 0 is that of the root, and expansion 1 + c that of the node in scratch column c. The first
T candidates are the nodes of a trie, if there is one, and candidate ``T + e * K + k`` is the k-th
child of expansion e, so candidates come after their parents. The best candidates are the N most
valuable so far, in descending order; of equals, the earlier comes first. Because a child is never
worth more than its parent, they form a tree in which parents precede their children. Other
candidates are neither expanded nor kept.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numpy as np
import torch

from dyntree_kernels.contracts import (
    DraftDistributions,
    GrowthSettings,
    StepGrowth,
    expansions_of,
)
from dyntree_kernels.cpu.candidates import keep
from dyntree_kernels.cpu.children import pick_children
from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.drawn import draw_children
from dyntree_kernels.cpu.grafts import GraftArrays, take
from dyntree_kernels.cpu.layout import flat
from dyntree_kernels.cpu.simd import as_numpy
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.tries import Trie

_NONE = np.float32(-np.inf)
_NOWHERE = 1 << 30  # an expansion that there never is
_NANOSECONDS = 2  # per score; use_torch_threads counts operations of about a nanosecond


@compiled
def _depth(candidate, children, depths, grafts, r):
    """Return the depth of a candidate of request r; depths [E] are those of expansions."""
    grafted = grafts.tokens.shape[1]
    if candidate < grafted:
        return grafts.depths[r, candidate]
    return depths[(candidate - grafted) // children] + 1


@compiled
def _next_to_expand(
    best, count, values, expanded, least, max_depth, children, depths, grafts, r, first
):
    """Return the most valuable candidate to expand, or -1.

    It has not been expanded, its children can still be among the best candidates, and its parent
    is one of the expansions before `first`.
    """
    full = count == best.shape[0]
    for i in range(count):
        candidate = best[i]
        value = values[candidate]
        if value < least or (full and value <= values[best[count - 1]]):
            return -1
        if expanded[candidate] or _expansion_above(candidate, grafts, r) >= first:
            continue
        if _depth(candidate, children, depths, grafts, r) < max_depth:
            return candidate
    return -1


@compiled
def _expansion_above(candidate, grafts, r):
    """Return the expansion of a trie's node's parent: 0 for the root, a large one if the parent has
    none. Return 0 for the draft's candidates, whose parents have been expanded before."""
    if candidate >= grafts.tokens.shape[1] or grafts.above[r, candidate] < 0:
        return np.int64(0)
    above = grafts.expansions[r, grafts.above[r, candidate]]
    return above if above >= 0 else _NOWHERE


@compiled
def _expand(
    added, expansions, least, max_depth, bases, edges, values, expanded, best, counts, grown,
    tokens, nodes, depths, bits, positions, grafts, roots, levels, longest, shift, ids,
    row_positions, slots, scratch, rows_above, row_bits,
):  # fmt: skip
    """Add the children of `added`, choose the nodes of `expansions`, and write their draft rows.

    Returns the number of nodes.
    added, expansions: ranges of expansions.
    roots [R]: positions of the roots. All positions are limited to `longest`.
    levels [R]: as in `RequestParams`.
    shift: as in `GrowthSettings`.
    ids, row_positions, slots, rows_above, row_bits: a row per node, written. A row without a node
    sees no scratch column, and its slot is -1.
    """
    requests, width, children = roots.shape[0], expansions[1] - expansions[0], edges.shape[2]
    columns, total, grafted = nodes.shape[1] - 1, 0, grafts.tokens.shape[1]
    for r in range(requests):
        keep(
            r, added, least, bases[r], edges[r], values[r], expanded[r], best[r],
            counts[r : r + 1], grown[r : r + 1], nodes[r], grafts,
        )  # fmt: skip
        room = min(columns, longest - roots[r])
        for row in range(r * width, (r + 1) * width):
            e = expansions[0] + row - r * width
            node = _next_to_expand(
                best[r], counts[r], values[r], expanded[r], least, min(max_depth, levels[r]),
                children, depths[r], grafts, r, expansions[0] if shift < 0 else _NOWHERE + 1,
            )  # fmt: skip
            exists = node >= 0 and e - 1 < room
            above, token = 0, np.int64(0)
            if node >= 0:
                expanded[r, node] = True
            if exists and node < grafted:
                parent, token = grafts.above[r, node], grafts.tokens[r, node]
                above = grafts.expansions[r, parent] if parent >= 0 else 0
                grafts.expansions[r, node] = e
            elif exists:
                above = (node - grafted) // children
                token = tokens[r, above, (node - grafted) % children]
            nodes[r, e] = node if exists else -1
            bases[r, e] = values[r, node] if exists else _NONE
            depths[r, e] = depths[r, above] + 1
            positions[r, e] = min(roots[r] + depths[r, e], longest)
            ids[row] = token
            row_positions[row] = positions[r, e] + shift
            rows_above[row] = r * (columns + 1) + above
            for group in range(slots.shape[0]):
                slots[group, row] = scratch[group, r * columns + e - 1] if exists else -1
            bits[r, e] = 0
            if exists:
                bits[r, e] = bits[r, above]
                bits[r, e, (e - 1) // 32] |= np.uint32(1) << np.uint32((e - 1) % 32)
                total += 1
            row_bits[row] = bits[r, e]
    return total


@compiled
def _parent_and_token(candidate, r, children, tokens, nodes, grafts):
    """Return the candidate above a candidate of request r, -1 for the root; and its token."""
    grafted = grafts.tokens.shape[1]
    if candidate < grafted:
        return grafts.above[r, candidate], grafts.tokens[r, candidate]
    e, k = (candidate - grafted) // children, (candidate - grafted) % children
    return nodes[r, e] if e > 0 else np.int64(-1), tokens[r, e, k]


@compiled
def _store(
    added, least, bases, edges, values, expanded, best, counts, grown, tokens, nodes, depths,
    features, grafts, became, shift, slots, out, out_parents, out_depths, out_values, out_counts,
    out_admitted, out_grown, out_bits, out_features, out_kinds, out_forwards,
):  # fmt: skip
    """Add the children of expansions `added`, and store the trees.

    shift: as in `GrowthSettings`.
    out [R, N]: tokens of the nodes, written. The arrays after it are those of `TreeArrays`, written
    at `slots` [R]. became [candidates]: working memory.
    """
    children, budget, grafted = edges.shape[2], best.shape[1], grafts.tokens.shape[1]
    for r in range(slots.shape[0]):
        keep(
            r, added, least, bases[r], edges[r], values[r], expanded[r], best[r],
            counts[r : r + 1], grown[r : r + 1], nodes[r], grafts,
        )  # fmt: skip
        at, count = slots[r], counts[r]
        out_counts[at] = out_admitted[at] = count
        out_grown[at] = grown[r]
        out_bits[at] = 0
        out_bits[at, 0, 0] = 1
        for n in range(budget):
            real = n < count
            candidate = best[r, n] if real else 0
            above, token = _parent_and_token(candidate, r, children, tokens, nodes, grafts)
            parent = became[above] if real and above >= 0 else -1
            became[candidate] = n
            out[r, n] = token if real else 0
            out_parents[at, n] = parent
            out_depths[at, n] = 1 + (out_depths[at, parent] if parent >= 0 else 0)
            drafted = candidate >= grafted and parent >= 0
            out_forwards[at, n] = 0
            if drafted and shift < 0:
                out_forwards[at, n] = out_depths[at, parent]
            elif drafted:
                out_forwards[at, n] = 1 + out_forwards[at, parent]
            out_values[at, n] = values[r, candidate] if real else _NONE
            out_bits[at, n + 1] = out_bits[at, parent + 1]
            out_bits[at, n + 1, (n + 1) // 32] |= np.uint32(1) << np.uint32((n + 1) % 32)
            _describe(candidate, r, children, features, grafts, out_kinds[at], out_features[at], n)


@compiled
def _describe(candidate, r, children, features, grafts, kinds, of_nodes, n):
    """Write the kind of a candidate of request r, and its features if there are any, to node n."""
    grafted = grafts.tokens.shape[1]
    e, k = (candidate - grafted) // children, (candidate - grafted) % children
    kinds[n] = grafts.kinds[r, candidate] if candidate < grafted else grafts.beside[r, e]
    if of_nodes.shape[0] > 0 and candidate < grafted:
        of_nodes[n] = grafts.features[r, candidate]
    elif of_nodes.shape[0] > 0:
        of_nodes[n] = features[r, e, k]


class CompiledGrowth(StepGrowth):
    """A `StepGrowth` in compiled calls on the CPU."""

    def __init__(self, settings: GrowthSettings) -> None:
        weights, trees = settings.weights, settings.trees
        requests, children = len(settings.of_requests.roots), settings.children
        expansions = 1 + sum(settings.widths)
        candidates = settings.grafts + children * expansions
        self._widths = self._every = settings.widths
        self._firsts = [expansions_of(self._every, each)[0] for each in range(1 + len(self._every))]
        self._coupled = settings.coupled
        self._children = children
        self._longest, self._max_depth = settings.longest, settings.max_depth
        self._shift = settings.shift
        least = math.log(settings.least) if settings.least > 0 else -math.inf
        self._least = np.float32(least)
        self._weights = np.empty((0, 3), np.float32) if weights is None else weights.numpy()
        self._rows = tuple(each.numpy() for each in settings.rows)
        self._trees = tuple(
            (each.view(torch.uint32) if each is trees.ancestors else each).numpy() for each in trees
        )
        num_features = 0 if weights is None else 2
        self.tokens = np.zeros((requests, expansions, children), np.int64)
        self.edges = np.zeros((requests, expansions, children), np.float32)
        """Log of the estimated probability that the target accepts a child after its parent."""
        self.features = np.zeros((*self.edges.shape, num_features), np.float32)
        self._bases_tensor = torch.zeros(requests, expansions)
        self._bases = self._bases_tensor.numpy()
        self._values = np.zeros((requests, candidates), np.float32)
        self._expanded = np.zeros((requests, candidates), np.bool_)
        self._best = np.zeros((requests, settings.node_budget), np.int64)
        self._counts = np.zeros(requests, np.int64)
        self._grown = np.zeros(requests, np.int64)
        self._nodes = np.full((requests, expansions), -1, np.int64)
        self._depths = np.zeros((requests, expansions), np.int64)
        self._positions = np.zeros((requests, expansions), np.int64)
        self._bits = np.zeros((requests, expansions, max(1, -(-(expansions - 1) // 32))), np.uint32)
        self._grafts = GraftArrays.room(requests, settings.grafts, expansions)
        self._became = np.full(candidates, -1, np.int64)
        self._forward = 0
        # Expansions whose children will be picked next, and those whose children were picked last.
        self._new = self._picked = (0, 1)
        self._of_requests = tuple(each.numpy() for each in settings.of_requests)
        self._drawing = settings.drawing
        self._changes = np.zeros_like(self.edges)
        self._first(requests)

    def start(self, requests: int) -> None:
        self._widths = self._every
        self.resume(requests, 0)
        self._positions[:requests, 0] = self._roots
        if self._drawing is not None:
            expansions = torch.arange(self.edges.shape[1])[:, None]
            seeds = torch.from_numpy(self._request_inputs[2])
            self._seeds = self._drawing.seeds(seeds, expansions).numpy()
            if self._drawing.chains:
                temperatures, _, _, chained = self._request_inputs
                np.logical_or(chained, temperatures > 0, out=chained)
        self._picked = (0, 0)
        self._grafts.edges[:requests] = _NONE

    def narrow(self) -> bool:
        *_, chained = self._request_inputs
        if not chained.all():
            return False
        self._widths = (1,) * len(self._every)
        if self._drawing is not None:
            # A chain is drawn with the same noise whatever is beside it.
            self._seeds = self._seeds[self._firsts]
        return True

    def graft(self, trie: Trie) -> None:
        requests, size = len(self._roots), self._grafts.tokens.shape[1]
        if any(part.shape != (requests, size) for part in trie):
            raise ValueError(f"trie.tokens {tuple(trie.tokens.shape)} must be {[requests, size]}")
        self._expanded[:requests] = False
        self.edges[:requests, 0] = _NONE  # no pick may follow
        temperatures, classes, seeds, chained = self._request_inputs
        if self._drawing is not None:  # a trie's nodes are no draws
            chained = chained | (temperatures > 0)
        take(
            self._grafts, *(part.numpy() for part in trie), self._roots, temperatures, classes,
            seeds, chained, self._weights, self._coupled, np.minimum(self._levels, self._max_depth),
        )  # fmt: skip

    def resume(self, requests: int, forwards: int) -> None:
        self._first(requests)
        self._forward = forwards
        self._new = self._picked = expansions_of(self._widths, forwards)

    def _first(self, requests: int) -> None:
        """Grow the trees of the first ``requests``."""
        of_requests = (each[:requests] for each in self._of_requests)
        self._roots, *self._request_inputs, self._levels, self._slots = of_requests

    def pick(self, logits: torch.Tensor) -> None:
        first, last = self._new
        rows, vocab = logits.shape
        if rows != len(self._roots) * (last - first):
            raise ValueError(f"logits of {rows} rows; must be {len(self._roots)} x {last - first}")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        use_torch_threads(_NANOSECONDS * rows * vocab)
        pick_children(
            as_numpy(flat(logits)), logits.stride(0), vocab, self._coupled, *self._request_inputs,
            self._positions, self._weights, (first, last - first), self._nodes, self._grafts,
            self._bases, self.tokens, self.edges, self.features, self._drawing is not None,
        )  # fmt: skip
        if self._drawing is not None:
            self._draw(logits, self._drawing.distributions)
        self._picked = self._new

    def _draw(self, logits: torch.Tensor, kept: DraftDistributions) -> None:
        """Draw the children of rows at a temperature above 0."""
        temperatures, classes, _, chained = self._request_inputs
        draw_children(
            as_numpy(flat(logits)), logits.stride(0), logits.shape[1],
            (self._new[0], self._new[1] - self._new[0]), temperatures, classes, self._seeds,
            chained, self._roots, self._weights, self._nodes, self._grafts.tokens.shape[1],
            self._bases, self._slots, kept.tokens.numpy(), kept.chances.numpy(), self.tokens,
            self.edges, self.features, self._changes,
        )  # fmt: skip

    def expand(self, ancestor_bits: torch.Tensor) -> int:
        added, last = self._picked, self._new[1]
        self._new, self._picked = (last, last + self._widths[self._forward]), (last, last)
        self._forward += 1
        found: int = _expand(
            added, self._new, self._least, self._max_depth, self._bases, self.edges, self._values,
            self._expanded, self._best, self._counts, self._grown, self.tokens, self._nodes,
            self._depths, self._bits, self._positions, self._grafts, self._roots, self._levels,
            self._longest, self._shift, *self._rows, ancestor_bits.view(torch.uint32).numpy(),
        )  # fmt: skip
        return found

    @property
    def frontier_values(self) -> torch.Tensor:
        return self._bases_tensor[: len(self._roots), slice(*self._new)]

    def finish(self) -> torch.Tensor:
        tokens = torch.empty(len(self._roots), self._best.shape[1], dtype=torch.int64)
        _store(
            self._picked, self._least, self._bases, self.edges, self._values, self._expanded,
            self._best, self._counts, self._grown, self.tokens, self._nodes, self._depths,
            self.features, self._grafts, self._became, self._shift, self._slots, tokens.numpy(),
            *self._trees,
        )  # fmt: skip
        if self._drawing is not None:
            origins = (self._best[: len(tokens)] - self._grafts.tokens.shape[1]) // self._children
            self._drawing.origins.numpy()[self._slots] = origins
        return tokens
