"""A threshold that is found while growing: a full budget at a bounded cost of drafting.

DySpec (arXiv 2410.11744) leaves open how to choose t of its Algorithm 2: a fixed t makes large
trees where the draft is unsure and small ones where it is sure. Here t is at every draft forward
the ``node_budget``-th largest slot value known, per request: what is below it will not be in the
tree. Of the nodes above it the ``width`` most valuable are expanded, and ``max_depth`` bounds the
draft forwards. With enough of both the tree is that of Algorithm 1 (`dyspec`); with less, nodes
of little value stay leaves, their place in the budget goes to the next best slots that exist, and
rules that reason about draws stay exact (`SlotGrowth` says why).
"""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import Draft, Draw, GrowthConfig, GrowthPlan, Slot
from dyntree_plugin.tree.growth.best_first import slot_plan
from dyntree_plugin.tree.papers.dyspec import without
from dyntree_plugin.tree.shape import TreeShape


def plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    return slot_plan(config, shape, _widths(shape))


def _widths(shape: TreeShape) -> tuple[int, ...]:
    """As wide as ``width`` and what there is to expand allow. Of the most valuable
    ``node_budget`` slots no more than half can be first children's that are to come."""
    widths = []
    leaves = shape.children
    for _ in range(1, shape.max_depth if shape.node_budget > 1 else 1):
        width = min(shape.width, shape.node_budget // 2, leaves)
        leaves += width * (shape.children - 1)
        widths.append(width)
    return tuple(widths)


def reference(draft: Draft, draw: Draw, shape: TreeShape) -> list[Slot]:
    """The same without a threshold: every forward expands the most valuable nodes; nodes from
    the most valuable down."""
    slots: list[Slot] = []

    def expand(node: Slot) -> None:
        v, residual = node.value, list(draft(node.path))
        for _ in range(shape.children):
            if v <= 0 or sum(residual) <= 0:
                break
            y = draw(node.path, residual)
            slots.append(Slot((*node.path, y), v, v * residual[y]))
            v *= 1 - residual[y]
            residual = without(residual, y)

    expand(Slot((), 1.0, 1.0))
    leaves = list(slots)
    for width in _widths(shape):
        leaves.sort(key=lambda node: -node.value)
        chosen, leaves = leaves[:width], leaves[width:]
        known = len(slots)
        for node in chosen:
            expand(node)
        leaves += slots[known:]
    return sorted(slots, key=lambda node: -node.slot)[: shape.node_budget]
