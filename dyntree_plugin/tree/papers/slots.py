"""Growth by slot value, as trees need whose children were drawn: DySpec's family.

Drawing children one after another without replacement from D is sorting log D + Gumbel noise in
descending order, so a node's children are K tokens in draw order. If v is the value of their
parent, the k-th has the slot value v · (1 - D[y_1] - … - D[y_k-1]). That is v of its slot in
DySpec's Algorithm 1, and it does not depend on y_k. Its own value, which is that of its first
child's slot, is v · D[y_k]. Neither value rises from parent to child or from sibling to sibling.

Rules that reason about the draws need every slot to be kept or cut without regard to its own
draw. That holds here, however few the draft forwards and however narrow the frontier: nodes of at
least a slot's value are expanded before the slot's node whatever the slot draws, and nodes of less
value have children that all rank below the slot.
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch

from dyntree_plugin.tree.growth.base import Frontier, GrowthPlan
from dyntree_plugin.tree.papers.pool import CandidatePool
from dyntree_plugin.tree.shape import Sampling, TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree


class SlotGrowth:
    """One step's growth over R requests, which expands by value and keeps by slot value."""

    sampling: ClassVar[Sampling] = "without_replacement"

    def __init__(
        self,
        num_requests: int,
        columns: torch.Tensor,
        *,
        node_budget: int,
        children: int,
        widths: tuple[int, ...],
        threshold: float = 0.0,
    ) -> None:
        """Start without candidates.

        ``columns`` int64 [R] is the number of scratch columns that each request has room for.
        ``threshold`` is the least slot value of a node.
        """
        self.children = children
        self.widths = widths
        self._node_budget = node_budget
        self._pool = CandidatePool(num_requests, children, widths, columns)
        # The values of candidates that have not been expanded.
        self._open = self._pool.values.clone()
        self._slots = self._pool.values.clone()
        self._least = math.log(threshold) if threshold > 0 else NO_VALUE

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        """Add the children of the last frontier; see `Growth.add`."""
        pool, new = self._pool, self._pool.new
        pool.add(tokens, log_probs, distributions)
        # In double precision, since what is left of D is a small difference of large numbers.
        drawn = log_probs.double().exp()
        before = torch.nn.functional.pad(drawn[:, :, :-1].cumsum(dim=2), (1, 0))
        left = (1 - before).clamp_(min=0).log_().type_as(pool.bases)
        slots = pool.bases[:, new, None] + left
        # Draws from nothing are none, and slots below the threshold do not exist.
        slots.masked_fill_((log_probs == NO_VALUE) | (slots < self._least), NO_VALUE)
        values = pool.by_expansion(pool.values)[:, new]
        torch.minimum(values, slots, out=values)
        pool.by_expansion(self._slots)[:, new] = slots
        opened = values.masked_fill(values < self._least, NO_VALUE)
        pool.by_expansion(self._open)[:, new] = opened

    def frontier(self) -> Frontier:
        """Pick the most valuable nodes that have no children yet.

        The ``node_budget``-th largest slot value so far, their first children's slots included,
        bounds the final one from below: nodes of less value get no children.
        """
        pool, slots = self._pool, self._slots[:, : self._pool.size]
        best = self._open[:, : max(pool.size, pool.width)].topk(pool.width, dim=1)
        nodes, values = best.indices, best.values
        self._open.scatter_(1, nodes, NO_VALUE)
        worthwhile = values > NO_VALUE
        if slots.shape[1] + values.shape[1] > self._node_budget:
            known = torch.cat([slots, values], dim=1)
            bound = known.topk(self._node_budget, dim=1).values[:, -1:]
            worthwhile &= values >= bound
        return pool.expand(nodes, worthwhile)

    def finish(self) -> TokenTree:
        """Keep the ``node_budget`` slots of highest slot value, in that order."""
        return self._pool.tree(self._slots, self._node_budget)


def slot_plan(shape: TreeShape, widths: tuple[int, ...], threshold: float = 0.0) -> GrowthPlan:
    """Return the plan of a `SlotGrowth` with these frontier ``widths``."""
    start = partial(
        SlotGrowth,
        node_budget=shape.node_budget,
        children=shape.children,
        widths=widths,
        threshold=threshold,
    )
    return GrowthPlan(SlotGrowth.sampling, shape.children, widths, start)


def sufficient_widths(shape: TreeShape) -> tuple[int, ...]:
    """Return frontier widths with which `SlotGrowth` expands every node that the final tree needs.

    The nodes that forward f must expand have depth f, and their first children's slots are among
    the ``node_budget`` most valuable known. The nodes themselves and their ancestors are worth no
    less, so they are among them too, and a layer has at least one node per ``children`` nodes of
    the layer below.
    """
    node_budget, children = shape.node_budget, shape.children
    widths = []
    for depth in range(1, shape.max_depth):
        width = min(node_budget // 2, children**depth)
        while width > 0 and 2 * width + _fewest_above(width, children, depth) > node_budget:
            width -= 1
        if width == 0:
            break
        widths.append(width)
    return tuple(widths)


def _fewest_above(nodes: int, children: int, depth: int) -> int:
    """Return the fewest ancestors, without the root, that ``nodes`` nodes at ``depth`` have."""
    total = 0
    for _ in range(depth - 1):
        nodes = -(-nodes // children)
        total += nodes
    return total
