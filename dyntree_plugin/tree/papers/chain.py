"""One path: what engines without trees speculate, the baseline for all others."""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import GrowthConfig, GrowthPlan
from dyntree_plugin.tree.papers.static import StaticTree, static_plan
from dyntree_plugin.tree.shape import TreeShape


def plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    """A path of ``max_depth`` nodes, or ``node_budget`` if that is less."""
    sampling = config.pick_sampling("best", "without_replacement", "with_replacement")
    tree = static_tree(min(shape.max_depth, shape.node_budget))
    return static_plan(tree, shape.node_budget, sampling)


def static_tree(depth: int) -> StaticTree:
    return StaticTree(tuple(range(-1, depth - 1)), (0,) * depth)
