"""DySpec, Algorithm 1 (arXiv 2410.11744): the tree of the ``node_budget`` most valuable slots.

The paper pops the most valuable slot from a heap, draws its token, and pushes the slots that this
opens: its first child's and its next sibling's, each with the residual distribution R that it is
to be drawn from. That takes one draft forward per node.

The same tree takes one draft forward per layer. Slot values rise neither from parent to child nor
from sibling to sibling, so the heap pops slots in descending order, and its tree of m nodes is the
m most valuable slots of all. The m-th largest value of any slots known so far is a lower bound of
the last one popped, so expanding every node whose first child's slot is at or above that bound
misses none, and after forward d every slot of the tree at depths up to d + 1 is known.
"""

from __future__ import annotations

import heapq
import itertools

from dyntree_plugin.tree.growth.base import Draft, Draw, GrowthConfig, GrowthPlan, Path, Slot
from dyntree_plugin.tree.growth.best_first import slot_plan, sufficient_widths
from dyntree_plugin.tree.shape import TreeShape


def plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    """Algorithm 1 down to ``max_depth``, with at most ``children`` siblings. Frontiers are as wide
    as the tree can ask for; ``width`` plays no part."""
    return slot_plan(config, shape, sufficient_widths(shape))


def reference(draft: Draft, draw: Draw, shape: TreeShape) -> list[Slot]:
    """Algorithm 1 by the book, in the order in which nodes are drawn.

    ``draft`` and ``draw`` are D(· | x, path) and y ~ R of the paper. Slots below ``max_depth``,
    and behind the last of ``children`` siblings, do not exist.
    """
    tree: list[Slot] = []
    order = itertools.count()
    heap: list[tuple[float, int, Path, list[float], int]] = []

    def push(v: float, path: Path, residual: list[float], siblings: int) -> None:
        if v > 0 and sum(residual) > 0 and siblings < shape.children:
            heapq.heappush(heap, (-v, next(order), path, residual, siblings))

    push(1.0, (), list(draft(())), 0)
    while heap and len(tree) < shape.node_budget:
        negative, _, path, residual, siblings = heapq.heappop(heap)
        v = -negative
        y = draw(path, residual)
        v0 = v * residual[y]
        v1 = v * (1 - residual[y])
        tree.append(Slot((*path, y), v, v0))
        push(v1, path, without(residual, y), siblings + 1)
        if len(path) + 1 < shape.max_depth:
            push(v0, (*path, y), list(draft((*path, y))), 0)
    return tree


def without(residual: list[float], y: int) -> list[float]:
    """R[y] = 0; R = R / sum(R)."""
    rest = [0.0 if token == y else p for token, p in enumerate(residual)]
    total = sum(rest)
    return [p / total for p in rest] if total > 0 else rest
