"""Learn what trees are worth by their draft forwards, and what drafting costs.

Engines need this if the host must choose a step's draft forwards and nodes before it has a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dyntree_plugin.tree.budget.row_cost import MEMORY, followed

STEP = 0.1
"""Weight of a step in averages."""
FIRST_FORWARD_SECONDS = 1e-3
"""Seconds of a draft forward and its growth, until measured."""


def worth_by_forwards(
    chances: np.ndarray, needed: np.ndarray, forwards: int, sizes: Sequence[int]
) -> np.ndarray:
    """Estimate what R trees would have been worth with fewer draft forwards.

    A tree's worth is the sum of its nodes' values: the tokens that it is expected to add. Entry
    [f, i] of the result, [forwards + 1, sizes], is the mean worth of the first ``sizes[i]`` nodes
    that need at most f forwards. ``chances`` and ``needed`` [R, N] are value and needed forwards
    (`TreeArrays.forwards`) of nodes in the order of their values; padding has value 0. The estimate
    misses nodes that later ones drove out of the tree, and counts some that a later forward added.
    """
    reached = needed <= np.arange(forwards + 1)[:, None, None]
    kept = reached.cumsum(axis=2)[:, None] <= np.array(sizes)[:, None, None]
    worth: np.ndarray = np.einsum("rn,frn,fsrn->fs", chances, reached, kept) / len(chances)
    return worth


def batch_worth(chances: np.ndarray, needed: np.ndarray, forwards: int) -> np.ndarray:
    """Estimate what the best nodes of a batch of R trees would have been worth with fewer forwards.

    Entry [f, n] of the result, [forwards + 1, N + 1], is the worth per request of the R * n most
    valuable nodes among those that need at most f forwards. Arguments as of `worth_by_forwards`.
    """
    requests = len(chances)
    reached = needed.ravel() <= np.arange(forwards + 1)[:, None]
    best = np.sort(np.where(reached, chances.ravel(), 0.0), axis=1)[:, ::-1]
    whole = best.cumsum(axis=1)[:, requests - 1 :: requests] / requests
    return np.pad(whole, ((0, 0), (1, 0)))


class TreeWorth:
    """Averages `worth_by_forwards`; for more forwards than a step made, by earlier ratios."""

    def __init__(self, forwards: int) -> None:
        """``forwards``: the most that draft a tree."""
        self.table: np.ndarray | None = None
        """[forwards + 1, sizes]; None before the first observation."""
        self.whole_trees = 0
        """Number of observed trees that every forward drafted."""
        self._forwards = forwards
        self._times = np.zeros(forwards + 1)
        self._age = np.zeros(forwards + 1)

    def observe(self, seen: np.ndarray, trees: int) -> None:
        """Learn from the mean worth ``seen`` [f + 1, sizes] of trees that f forwards drafted."""
        drafted = len(seen)
        if drafted > self._forwards:
            self.whole_trees += trees
        if self.table is None:
            self.table = np.pad(seen, ((0, 1 + self._forwards - drafted), (0, 0)), mode="edge")
        old = self.table.copy()
        self._age += 1
        self._times[:drafted] += 1
        # An old entry is replaced by the mean of many trees, not of one.
        weight = 1 - (1 - STEP) ** np.minimum(self._age[:drafted], trees)
        weight = np.maximum(weight, 1 / self._times[:drafted])[:, None]
        self.table[:drafted] += weight * (seen - old[:drafted])
        if drafted <= self._forwards:
            last = drafted - 1
            ratio = np.where(old[last] > 0, self.table[last] / np.maximum(old[last], 1e-9), 1.0)
            self.table[drafted:] *= ratio
        # More forwards never make a tree worth less.
        np.maximum.accumulate(self.table, axis=0, out=self.table)
        self._age[:drafted] = 0


class ForwardSeconds:
    """The seconds of a draft forward and the growth after it, by the size of the batch."""

    def __init__(self) -> None:
        # Batches of about the same size: the average, and how often it was seen.
        self._known: dict[int, tuple[float, int]] = {}

    def observe(self, requests: int, forwards: int, seconds: float) -> None:
        """Learn from a step's drafting; the forward over emitted tokens is among ``forwards``."""
        each, kind = seconds / forwards, requests.bit_length()
        average, times = self._known.get(kind, (each, 0))
        # The first observations may be far off.
        memory = min(1.0 + times, MEMORY)
        self._known[kind] = followed(average, each, memory), times + 1

    def of(self, requests: int) -> float:
        """Return the seconds of the most similar batches."""
        nearest = min(self._known, key=lambda kind: abs(kind - requests.bit_length()), default=None)
        return FIRST_FORWARD_SECONDS if nearest is None else self._known[nearest][0]
