"""DySpec, Algorithm 1 (arXiv 2410.11744): the tree of the ``node_budget`` most valuable slots.

The paper pops the most valuable slot from a heap, draws its token, and pushes the slots that this
opens: its first child's and its next sibling's, each with the residual distribution R that it is
to be drawn from. That takes one draft forward per node.

The same tree takes one draft forward per layer. Slot values rise neither from parent to child nor
from sibling to sibling, so the heap pops slots in descending order, and its tree of m nodes is the
m most valuable slots of all. The m-th largest value of any slots known so far is a lower bound of
the last one popped. So it misses none to expand every node whose first child's slot is at or above
that bound, and after forward d every slot of the tree at depths up to d + 1 is known.
"""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers.slots import slot_plan, sufficient_widths
from dyntree_plugin.tree.shape import Sampling, TreeShape


def plan(shape: TreeShape, sampling: Sampling, parameter: None) -> GrowthPlan:
    """Return the plan of Algorithm 1 down to ``max_depth``, with at most ``children`` siblings.

    Frontiers are as wide as the tree can ask for; ``width`` plays no part.
    """
    return slot_plan(shape, sufficient_widths(shape))


SPEC = GrowthSpec(
    name="dyspec",
    summary="by DySpec's Algorithm 1",
    reads=("max_depth", "children"),
    samplings=("without_replacement",),
    plan=plan,
)
