"""SpecInfer's expansion configuration ⟨k1, k2, …, km⟩ (arXiv 2305.09781, section 3): every node at
depth i - 1 has ki children. The paper evaluates ⟨1, 1, 3, 1, 1, 1, 1, 1⟩.

Its multi-step verification asks for children that are drawn independently. Draws that coincide are
one node, so a tree may have fewer nodes than the configuration has places.

With a pool of drafts each grows a tree of its best tokens, and the trees are merged (section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from dyntree_plugin.tree.growth.base import GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers.static import StaticTree, static_plan
from dyntree_plugin.tree.shape import Sampling, TreeShape


def plan(shape: TreeShape, sampling: Sampling, expansion: tuple[int, ...] | None) -> GrowthPlan:
    """Return the plan of the tree with these numbers of children at depth 0, 1, ….

    Raises:
        ValueError: without a configuration, or if it is none, or exceeds ``node_budget`` or
            ``max_depth``; or if several drafts are to draw their children.
    """
    k = expansion
    if k is None:
        raise ValueError("growth=expansion needs expansion, for example (1, 1, 3, 1, 1)")
    if not (k and min(k) >= 1):
        raise ValueError(f"expansion={k} must be numbers of children, each >= 1")
    if len(k) > shape.max_depth:
        raise ValueError(
            f"expansion={k} has depth {len(k)}: it must be at most max_depth={shape.max_depth}"
        )
    drafts = shape.drafts
    if drafts > 1 and sampling != "best":
        raise ValueError(
            f"sampling={sampling} is for one draft: with drafts, growth=expansion merges finished "
            "trees, and a rule needs the distribution of every draw. Use sampling=best"
        )
    nodes = sum(accumulate(k, mul))
    if drafts * nodes > shape.node_budget:
        of_all = f" for each of {drafts} drafts, {drafts * nodes} in all" if drafts > 1 else ""
        raise ValueError(
            f"expansion={k} has {nodes} nodes{of_all}: they must be at most "
            f"node_budget={shape.node_budget}"
        )
    return static_plan(static_tree(k), shape.node_budget, sampling, drafts)


def static_tree(k: Sequence[int]) -> StaticTree:
    """Return the tree whose nodes at depth i have ``k[i]`` children."""
    parents: list[int] = []
    ranks: list[int] = []
    layer = [-1]
    for children in k:
        start = len(parents)
        for parent in layer:
            parents += [parent] * children
            ranks += range(children)
        layer = list(range(start, len(parents)))
    return StaticTree(tuple(parents), tuple(ranks))


SPEC = GrowthSpec(
    name="expansion",
    summary="SpecInfer's trees of a given number of children at each depth",
    reads=(),
    samplings=("with_replacement", "without_replacement", "best"),
    plan=plan,
    parameter="expansion",
)
