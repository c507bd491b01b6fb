"""DySpec, Algorithm 2 (arXiv 2410.11744): layer by layer, every slot worth at least t.

The paper prints the loop's condition as v < t; it is v >= t. It draws as many nodes as that makes;
a tree here keeps the ``node_budget`` most valuable of them.
"""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import Draft, Draw, GrowthConfig, GrowthPlan, Slot
from dyntree_plugin.tree.growth.best_first import slot_plan, sufficient_widths
from dyntree_plugin.tree.papers.dyspec import without
from dyntree_plugin.tree.shape import TreeShape


def plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    """Algorithm 2; t is 1 / node_budget unless given, as the paper suggests."""
    t = 1 / shape.node_budget if config.threshold is None else config.threshold
    # The values of one layer's nodes add up to at most 1.
    most = int(1 / t + 1e-6)
    widths = tuple(min(width, most) for width in sufficient_widths(shape))
    return slot_plan(config, shape, widths, t)


def reference(draft: Draft, draw: Draw, shape: TreeShape, t: float) -> list[Slot]:
    """Algorithm 2 by the book, then the cut to the budget; nodes from the most valuable down."""
    tree: list[Slot] = []
    leaves = [Slot((), 1.0, 1.0)]
    for _ in range(shape.max_depth):
        layer: list[Slot] = []
        for leaf in leaves:
            if leaf.value < t:
                continue
            v, residual = leaf.value, list(draft(leaf.path))
            siblings = 0
            while v >= t and sum(residual) > 0 and siblings < shape.children:
                y = draw(leaf.path, residual)
                layer.append(Slot((*leaf.path, y), v, v * residual[y]))
                v *= 1 - residual[y]
                residual = without(residual, y)
                siblings += 1
        tree += layer
        leaves = layer
    return sorted(tree, key=lambda node: -node.slot)[: shape.node_budget]
