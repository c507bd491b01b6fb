"""A threshold that is chosen while growing: a full budget at a bounded cost of drafting.

DySpec (arXiv 2410.11744) leaves open how to choose t of its Algorithm 2: a fixed t makes large
trees where the draft is unsure and small ones where it is sure. Here t is at every draft forward
the ``node_budget``-th largest slot value known, per request: what is below it will not be in the
tree. Of the nodes above it the ``width`` most valuable are expanded, and ``max_depth`` bounds the
draft forwards. With enough of both, the tree is that of Algorithm 1 (`dyspec`). With less, nodes
of little value stay leaves, and their place in the budget goes to the next best slots that exist.
Rules that reason about draws stay exact (`papers.slots` says why).
"""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers.slots import slot_plan
from dyntree_plugin.tree.shape import Sampling, TreeShape


def plan(shape: TreeShape, sampling: Sampling, parameter: None) -> GrowthPlan:
    """Return the plan, with frontiers as wide as ``width`` and what there is to expand allow.

    Of the most valuable ``node_budget`` slots no more than half can be first children's that are
    to come.
    """
    widths = []
    leaves = shape.children
    for _ in range(1, shape.max_depth if shape.node_budget > 1 else 1):
        width = min(shape.width, shape.node_budget // 2, leaves)
        leaves += width * (shape.children - 1)
        widths.append(width)
    return slot_plan(shape, tuple(widths))


SPEC = GrowthSpec(
    name="dynamic_threshold",
    summary="as DySpec does, by a threshold found while growing",
    reads=("max_depth", "width", "children"),
    samplings=("without_replacement",),
    plan=plan,
)
