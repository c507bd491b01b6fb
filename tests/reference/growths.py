"""Growths as their papers describe them: one request, a heap or layers, plain numbers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dyntree_plugin.tree.shape import TreeShape

Path = tuple[int, ...]
"""The tokens on the path from the root to a node, without the root's. They identify the node."""

Draft = Callable[[Path], Sequence[float]]
"""Return D(· | x, path), the draft's distribution below a node."""

Draw = Callable[[Path, Sequence[float]], int]
"""Draw y ~ R below a node."""


class Slot(NamedTuple):
    """A node of a reference tree.

    ``slot`` is v before the node's token is drawn, in paper notation; ``value`` is v of its first
    child, the estimated acceptance of the path down to it.
    """

    path: Path
    slot: float
    value: float


def dyspec(draft: Draft, draw: Draw, shape: TreeShape) -> list[Slot]:
    """Grow by DySpec's Algorithm 1 (arXiv 2410.11744); nodes are in the order in which they are
    drawn.

    ``draft`` and ``draw`` are D(· | x, path) and y ~ R of the paper. There are no slots below
    ``max_depth`` or after the last of ``children`` siblings.
    """
    tree: list[Slot] = []
    order = itertools.count()
    heap: list[tuple[float, int, Path, list[float], int]] = []

    def push(v: float, path: Path, residual: list[float], siblings: int) -> None:
        if v > 0 and sum(residual) > 0 and siblings < shape.children:
            heapq.heappush(heap, (-v, next(order), path, residual, siblings))

    push(1.0, (), list(draft(())), 0)
    while heap and len(tree) < shape.node_budget:
        negative, _, path, residual, siblings = heapq.heappop(heap)
        v = -negative
        y = draw(path, residual)
        v0 = v * residual[y]
        v1 = v * (1 - residual[y])
        tree.append(Slot((*path, y), v, v0))
        push(v1, path, without(residual, y), siblings + 1)
        if len(path) + 1 < shape.max_depth:
            push(v0, (*path, y), list(draft((*path, y))), 0)
    return tree


def threshold(draft: Draft, draw: Draw, shape: TreeShape, t: float) -> list[Slot]:
    """Grow by DySpec's Algorithm 2, then cut to the budget; nodes are in order of falling value."""
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


def expansion(draft: Draft, draw: Draw, k: Sequence[int]) -> list[Slot]:
    """Grow SpecInfer's tree of independent draws, layer by layer. A token that is drawn again adds
    no node.

    ``draw`` makes the draws below one node in turn.
    """
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


def without(residual: list[float], y: int) -> list[float]:
    """Return R after y was drawn: R[y] = 0; R = R / sum(R)."""
    rest = [0.0 if token == y else p for token, p in enumerate(residual)]
    total = sum(rest)
    return [p / total for p in rest] if total > 0 else rest
