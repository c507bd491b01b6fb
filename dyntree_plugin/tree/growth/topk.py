"""Best-first growth with a bounded number of draft forwards: the serving default.

Every draft forward expands the ``width`` most valuable nodes of every request that have not
been expanded yet. After the last forward the ``node_budget`` most valuable candidates are the
tree. A node's value is the product of its path's edge probabilities, as in DySpec
(arXiv 2410.11744, section 4) and OPT-Tree (arXiv 2406.17276). It never rises along a path, so the
most valuable candidates always contain their ancestors. Children are the draft's best tokens, so
only rules fit that do not reason about draws: sample-and-match, or a greedy target.
"""

from __future__ import annotations

from dyntree_plugin.tree.growth.base import GrowthPlan, GrowthSpec
from dyntree_plugin.tree.shape import Sampling, TreeShape


def plan(shape: TreeShape, sampling: Sampling, min_value: float | None) -> GrowthPlan:
    """Return the plan; `dyntree_kernels` has the growth.

    Raises:
        ValueError: if ``min_value`` is no chance above 0.
    """
    if min_value is not None and not 0 < min_value <= 1:
        raise ValueError(f"min_value={min_value} must be above 0 and at most 1")
    return GrowthPlan(sampling, shape.children, shape.widths, start=None)


SPEC = GrowthSpec(
    name="topk",
    summary="the most valuable nodes first, for serving",
    reads=("max_depth", "max_forwards", "width", "children"),
    samplings=("best",),
    plan=plan,
    parameter="min_value",
    ordered=True,
    takes_tries=True,
)
