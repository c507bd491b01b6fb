"""One path: what engines without trees speculate, and the baseline for all other growths."""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers.static import StaticTree, static_plan
from dyntree_plugin.tree.shape import Sampling, TreeShape


def plan(shape: TreeShape, sampling: Sampling, parameter: None) -> GrowthPlan:
    """Return the plan of a path of ``max_depth`` nodes, or ``node_budget`` if that is less."""
    tree = static_tree(min(shape.max_depth, shape.node_budget))
    return static_plan(tree, shape.node_budget, sampling)


def static_tree(depth: int) -> StaticTree:
    """Return the path of ``depth`` nodes."""
    return StaticTree(tuple(range(-1, depth - 1)), (0,) * depth)


SPEC = GrowthSpec(
    name="chain",
    summary="one path, as engines without trees do",
    reads=("max_depth",),
    samplings=("best", "without_replacement", "with_replacement"),
    plan=plan,
    one_child=True,
)
