"""Best-first growth: each draft forward expands the most valuable nodes, and at the end the most
valuable candidates are the tree. Two rankings: by the path's value, and by slot value."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch

from dyntree_plugin.tree.growth.base import Frontier, GrowthConfig, GrowthPlan
from dyntree_plugin.tree.growth.pool import CandidatePool
from dyntree_plugin.tree.names import Sampling
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree


class BestFirstGrowth:
    """Expands and keeps by the value of the path, which never rises along a path: the most
    valuable candidates always contain their ancestors."""

    sampling: ClassVar[Sampling] = "best"

    def __init__(
        self,
        num_requests: int,
        columns: torch.Tensor,
        *,
        node_budget: int,
        children: int,
        widths: tuple[int, ...],
        least: float = 0.0,
    ) -> None:
        """``columns`` int64 [R]: how many scratch columns each request has room for. ``least``:
        the least value of a node, but for the root's first child, which may have any."""
        self.children = children
        self.widths = widths
        self._node_budget = node_budget
        self._pool = CandidatePool(num_requests, children, widths, columns)
        # The values of candidates that have not been expanded.
        self._open = self._pool.values.clone()
        self._least = math.log(least) if least > 0 else NO_VALUE

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        """As `Growth.add`."""
        if distributions is not None:
            raise ValueError("distributions are for growths that draw; this takes the best")
        pool, start = self._pool, self._pool.size
        pool.add(tokens, log_probs)
        self._open[:, start : pool.size] = pool.values[:, start : pool.size]

    def frontier(self) -> Frontier:
        """Pick the most valuable nodes that have no children yet.

        A node of no more value than ``node_budget`` candidates, itself among them, or of less than
        the least gets none: they would not be in the tree.
        """
        nodes, values = self._take()
        worthwhile = (values > NO_VALUE) & (values >= self._least)
        known = self._pool.values[:, : self._pool.size]
        if known.shape[1] >= self._node_budget:
            best = known.topk(self._node_budget, dim=1, sorted=False).values
            worthwhile &= values > best.amin(dim=1, keepdim=True)
        return self._pool.expand(nodes, worthwhile)

    def finish(self) -> TokenTree:
        """Keep the ``node_budget`` most valuable candidates."""
        values = self._pool.values
        ranks = values.masked_fill(values < self._least, NO_VALUE)
        ranks[:, 0] = values[:, 0]
        return self._pool.tree(ranks, self._node_budget)

    def _take(self) -> tuple[torch.Tensor, torch.Tensor]:
        width = self._pool.width
        best = self._open[:, : max(self._pool.size, width)].topk(width, dim=1)
        self._open.scatter_(1, best.indices, NO_VALUE)
        return best.indices, best.values


class SlotGrowth(BestFirstGrowth):
    """Expands by value and keeps by slot value, as trees need whose children were drawn.

    Drawing children one after another without replacement from D is sorting log D + Gumbel noise
    in descending order, so a node's children are K tokens in draw order. With the value v of
    their parent, the k-th has the slot value v · (1 - D[y_1] - … - D[y_k-1]), which is v of its
    slot in DySpec's Algorithm 1 and does not know y_k; its own value, that of its first child's
    slot, is v · D[y_k]. Neither rises from parent to child or from sibling to sibling.

    Rules that reason about the draws need every slot to be kept or cut without regard to its own
    draw. Here it is so, however few the draft forwards and however narrow the frontier: nodes of
    at least a slot's value are expanded before the slot's node whatever the slot draws, and nodes
    of less value have children that all rank below the slot.
    """

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
        """``threshold``: the least slot value of a node."""
        super().__init__(
            num_requests,
            columns,
            node_budget=node_budget,
            children=children,
            widths=widths,
            least=threshold,
        )
        self._slots = self._pool.values.clone()

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        """As `Growth.add`."""
        pool, new = self._pool, self._pool.new
        pool.add(tokens, log_probs, distributions)
        # In double precision: what is left of D is a small difference of large numbers.
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
        nodes, values = self._take()
        worthwhile = values > NO_VALUE
        if slots.shape[1] + values.shape[1] > self._node_budget:
            known = torch.cat([slots, values], dim=1)
            bound = known.topk(self._node_budget, dim=1).values[:, -1:]
            worthwhile &= values >= bound
        return pool.expand(nodes, worthwhile)

    def finish(self) -> TokenTree:
        """Keep the ``node_budget`` slots of highest slot value, in that order."""
        return self._pool.tree(self._slots, self._node_budget)


def slot_plan(
    config: GrowthConfig, shape: TreeShape, widths: tuple[int, ...], threshold: float = 0.0
) -> GrowthPlan:
    """The plan of a `SlotGrowth`."""
    sampling = config.pick_sampling(SlotGrowth.sampling)
    start = partial(
        SlotGrowth,
        node_budget=shape.node_budget,
        children=shape.children,
        widths=widths,
        threshold=threshold,
    )
    return GrowthPlan(sampling, shape.children, widths, start)


def sufficient_widths(shape: TreeShape) -> tuple[int, ...]:
    """Frontier widths with which `SlotGrowth` expands every node that the final tree needs.

    The nodes that forward f must expand have depth f, and their first children's slots are among
    the ``node_budget`` most valuable known. So are, as they are worth no less, the nodes
    themselves and their ancestors, at least one per ``children`` nodes of the layer below.
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
    """The fewest ancestors, without the root, that ``nodes`` nodes at ``depth`` have."""
    total = 0
    for _ in range(depth - 1):
        nodes = -(-nodes // children)
        total += nodes
    return total
