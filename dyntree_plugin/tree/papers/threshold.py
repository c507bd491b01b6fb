"""DySpec, Algorithm 2 (arXiv 2410.11744): layer by layer, every slot worth at least t.

The paper prints the loop's condition as v < t; it is v >= t. It draws as many nodes as that makes;
a tree here keeps the ``node_budget`` most valuable of them.
"""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers.slots import slot_plan, sufficient_widths
from dyntree_plugin.tree.shape import Sampling, TreeShape


def plan(shape: TreeShape, sampling: Sampling, threshold: float | None) -> GrowthPlan:
    """Return the plan of Algorithm 2; t is 1 / node_budget unless given, as the paper suggests.

    Raises:
        ValueError: if ``threshold`` is no chance above 0.
    """
    t = 1 / shape.node_budget if threshold is None else threshold
    if not 0 < t <= 1:
        raise ValueError(f"threshold={t} must be above 0 and at most 1")
    # The values of one layer's nodes add up to at most 1.
    most = int(1 / t + 1e-6)
    widths = tuple(min(width, most) for width in sufficient_widths(shape))
    return slot_plan(shape, widths, t)


SPEC = GrowthSpec(
    name="threshold",
    summary="by DySpec's Algorithm 2, with a fixed threshold",
    reads=("max_depth", "children"),
    samplings=("without_replacement",),
    plan=plan,
    parameter="threshold",
)
