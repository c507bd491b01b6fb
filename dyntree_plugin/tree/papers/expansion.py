"""SpecInfer's expansion configuration ⟨k1, k2, …, km⟩ (arXiv 2305.09781, section 3): every node at
depth i - 1 has ki children. The paper evaluates ⟨1, 1, 3, 1, 1, 1, 1, 1⟩.

Its multi-step verification asks for children that are drawn independently. Draws that coincide are
one node, so a tree may have fewer nodes than the configuration has places.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from dyntree_plugin.tree.growth.base import Draft, Draw, GrowthConfig, GrowthPlan, Path, Slot
from dyntree_plugin.tree.papers.static import StaticTree, static_plan
from dyntree_plugin.tree.shape import TreeShape


def plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    """
    Raises:
        ValueError: without a configuration, or if it exceeds ``node_budget`` or ``max_depth``.
    """
    sampling = config.pick_sampling("with_replacement", "best", "without_replacement")
    k = config.expansion
    if k is None:
        raise ValueError("growth=expansion needs expansion, for example (1, 1, 3, 1, 1)")
    if len(k) > shape.max_depth:
        raise ValueError(
            f"expansion={k} has depth {len(k)}: it must be at most max_depth={shape.max_depth}"
        )
    nodes = sum(accumulate(k, mul))
    if nodes > shape.node_budget:
        raise ValueError(
            f"expansion={k} has {nodes} nodes: they must be at most node_budget={shape.node_budget}"
        )
    return static_plan(static_tree(k), shape.node_budget, sampling)


def static_tree(k: Sequence[int]) -> StaticTree:
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


def reference(draft: Draft, draw: Draw, k: Sequence[int]) -> list[Slot]:
    """The tree of independent draws by the book, layer by layer; a token drawn again is no new
    node. ``draw`` makes the draws below one node in turn."""
    tree: list[Slot] = []
    layer = [Slot((), 1.0, 1.0)]
    for children in k:
        below: dict[Path, Slot] = {}
        for node in layer:
            probabilities = draft(node.path)
            for _ in range(children):
                y = draw(node.path, probabilities)
                value = node.value * probabilities[y]
                below.setdefault((*node.path, y), Slot((*node.path, y), node.value, value))
        layer = list(below.values())
        tree += layer
    return tree
