"""Sequoia's optimal static tree (arXiv 2402.12374, section 4.1), and the size and depth that suit
the hardware (section 4.3).

The only thing known of a token beforehand is which child it is: the b-th child of an accepted node
is accepted with probability P[b], whatever its depth. A tree then yields sum over its nodes of the
product of P along the path, the root counting 1: tokens per target step, bonus token included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyntree_plugin.tree.growth.base import GrowthConfig, GrowthPlan
from dyntree_plugin.tree.papers.static import StaticTree, static_plan
from dyntree_plugin.tree.shape import TreeShape


def plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    """The best tree of ``node_budget`` nodes down to ``max_depth``.

    Raises:
        ValueError: without an acceptance vector.
    """
    sampling = config.pick_sampling("without_replacement", "best")
    if config.acceptance is None:
        raise ValueError("growth=sequoia needs acceptance, for example (0.6, 0.15, 0.05)")
    tree = OptimalTrees(config.acceptance, shape.node_budget, shape.max_depth).tree()
    return static_plan(tree, shape.node_budget, sampling)


@dataclass(frozen=True)
class OptimalTrees:
    """The dynamic programme over trees of up to ``nodes`` nodes, the root not counted, and of
    depth at most ``max_depth`` (None: any). ``acceptance`` is P[1], P[2], ….

    Costs O(nodes^2 · children · max_depth) additions.
    """

    acceptance: tuple[float, ...]
    nodes: int
    max_depth: int | None = None

    def expected_tokens(self, nodes: int, depth: int | None = None) -> float:
        """G(n, d): what the best tree of n nodes, the root not counted, and depth <= d yields per
        target step; ``-inf`` if there is no such tree."""
        depth = self._depth if depth is None else depth
        return float(self._programme[depth].best[nodes + 1])

    def tree(self, nodes: int | None = None, depth: int | None = None) -> StaticTree:
        """The tree that yields `expected_tokens`; if n nodes do not fit, the largest that does."""
        depth = self._depth if depth is None else depth
        size = (self.nodes if nodes is None else nodes) + 1
        while self._programme[depth].best[size] == -np.inf:
            size -= 1
        children: list[list[int]] = []
        self._build(size, depth, children)
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
        return self.nodes if self.max_depth is None else min(self.max_depth, self.nodes)

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
    """Trees of n nodes, the root counted, within one depth bound; arrays over n = 0, 1, ….

    ``best[n]`` is Tmax[n], and ``siblings[n]`` how many children the root of that tree has;
    ``split[b, n]`` the size of the b-th child's subtree in the best tree whose root has b.
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
        """T[n, b] = max over m of T[n - m, b - 1] + P[b] · Tmax[m], where Tmax are trees one
        level lower."""
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


@dataclass(frozen=True)
class Choice:
    """A tree size that suits the hardware, its depth, and the speed-up to expect of it."""

    nodes: int
    depth: int
    speedup: float


def choose(
    acceptance: Sequence[float],
    target_seconds: Mapping[int, float],
    draft_seconds: float,
    max_depth: int,
) -> Choice:
    """The size n and depth d of highest Speedup(n, d) = G(n, d) / (t(n) + d · c).

    ``target_seconds``: the target's measured step by number of rows per request; row 1 is plain
    decoding, which the speed-up is over, and a tree of n nodes takes n + 1. ``draft_seconds``: the
    draft's forward. No tree (n = 0) is among the choices.

    Raises:
        ValueError: if plain decoding was not measured, or a time is not positive.
    """
    if 1 not in target_seconds:
        raise ValueError(f"target_seconds={dict(target_seconds)} must hold plain decoding, 1 row")
    if min(*target_seconds.values(), draft_seconds) <= 0:
        raise ValueError(
            f"target_seconds={dict(target_seconds)} and draft_seconds={draft_seconds} must be "
            "above 0"
        )
    plain = target_seconds[1]
    best = Choice(0, 0, 1.0)
    trees = OptimalTrees(tuple(acceptance), max(target_seconds) - 1, max_depth)
    for rows, seconds in sorted(target_seconds.items()):
        for depth in range(1, min(max_depth, rows - 1) + 1):
            tokens = trees.expected_tokens(rows - 1, depth)
            speedup = tokens * plain / (seconds + depth * draft_seconds)
            if speedup > best.speedup:
                best = Choice(rows - 1, depth, speedup)
    return best
