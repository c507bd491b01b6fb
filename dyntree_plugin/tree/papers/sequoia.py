"""Sequoia's optimal static tree (arXiv 2402.12374, section 4.1).

The only thing known of a token beforehand is which child it is: the b-th child of an accepted node
is accepted with probability P[b], whatever its depth. A tree then yields sum over its nodes of the
product of P along the path, the root counting 1: tokens per target step, bonus token included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyntree_plugin.tree.growth.base import GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers.static import StaticTree, static_plan
from dyntree_plugin.tree.shape import Sampling, TreeShape


def plan(shape: TreeShape, sampling: Sampling, acceptance: tuple[float, ...] | None) -> GrowthPlan:
    """Return the plan of the best tree of ``node_budget`` nodes down to ``max_depth``.

    Raises:
        ValueError: without an acceptance vector, or if it holds no probabilities.
    """
    if acceptance is None:
        raise ValueError("growth=sequoia needs acceptance, for example (0.6, 0.15, 0.05)")
    if not (acceptance and min(acceptance) >= 0 and 0 < sum(acceptance) <= 1 + 1e-6):
        raise ValueError(f"acceptance={acceptance} must be probabilities, their sum in (0, 1]")
    tree = OptimalTrees(acceptance, shape.node_budget, shape.max_depth).tree()
    return static_plan(tree, shape.node_budget, sampling)


@dataclass(frozen=True)
class OptimalTrees:
    """A dynamic programme over trees of up to ``nodes`` nodes, the root not counted, and of
    depth at most ``max_depth``. ``acceptance`` is P[1], P[2], ….

    It costs O(nodes^2 · children · max_depth) additions.
    """

    acceptance: tuple[float, ...]
    nodes: int
    max_depth: int

    def tree(self) -> StaticTree:
        """Return the tree of ``nodes`` nodes that yields the most tokens per target step.

        If so many nodes do not fit, it is the best of the largest trees that do.
        """
        size = self.nodes + 1
        while self._programme[self._depth].best[size] == -np.inf:
            size -= 1
        children: list[list[int]] = []
        self._build(size, self._depth, children)
        return StaticTree.from_children(children)

    def _build(self, size: int, depth: int, children: list[list[int]]) -> int:
        """Append a subtree of ``size`` nodes, its root counted, and return its root's index."""
        root = len(children)
        children.append([])
        layer = self._programme[depth]
        youngest_first = []
        for b in range(int(layer.siblings[size]), 0, -1):
            m = int(layer.split[b, size])
            youngest_first.append(m)
            size -= m
        for m in reversed(youngest_first):
            children[root].append(self._build(m, depth - 1, children))
        return root

    @property
    def _depth(self) -> int:
        return min(self.max_depth, self.nodes)

    @cached_property
    def _programme(self) -> list[_Layer]:
        """T of the paper by depth bound: layer d holds the trees of depth at most d."""
        layers = [_Layer.of_single_node(self.nodes + 1, len(self.acceptance))]
        for _ in range(self._depth):
            layers.append(_Layer.above(layers[-1].best, self.acceptance))
            if np.array_equal(layers[-1].best, layers[-2].best):
                break  # nothing is gained by more depth
        return layers + layers[-1:] * (self._depth + 1 - len(layers))


@dataclass(frozen=True)
class _Layer:
    """The best trees of n nodes, the root counted, within one depth bound; arrays over n = 0, 1, ….

    ``best[n]`` is Tmax[n], and ``siblings[n]`` is the number of children of that tree's root.
    ``split[b, n]`` is the size of the b-th child's subtree in the best tree whose root has b.
    """

    best: np.ndarray
    siblings: np.ndarray
    split: np.ndarray

    @classmethod
    def of_single_node(cls, size: int, children: int) -> _Layer:
        best = np.full(size + 1, -np.inf)
        best[1] = 1.0
        nothing = np.zeros((children + 1, size + 1), dtype=np.int64)
        return cls(best, nothing[0], nothing)

    @classmethod
    def above(cls, below: np.ndarray, acceptance: Sequence[float]) -> _Layer:
        """Compute T[n, b] = max over m of T[n - m, b - 1] + P[b] · Tmax[m], where Tmax are trees
        one level lower."""
        sizes = np.arange(len(below))
        table = np.full((len(acceptance) + 1, len(below)), -np.inf)
        table[0, 1] = 1.0
        split = np.zeros(table.shape, dtype=np.int64)
        rest = sizes[:, None] - sizes
        possible = (rest >= 1) & (sizes >= 1) & np.isfinite(below)
        for b, probability in enumerate(acceptance, start=1):
            sums = np.where(possible, table[b - 1][rest.clip(0)] + probability * below, -np.inf)
            split[b] = sums.argmax(axis=1)
            table[b] = sums.max(axis=1)
        return cls(table.max(axis=0), table.argmax(axis=0), split)


SPEC = GrowthSpec(
    name="sequoia",
    summary="Sequoia's static tree",
    reads=("max_depth",),
    samplings=("without_replacement", "best"),
    plan=plan,
    parameter="acceptance",
)
