"""Learn what trees are worth by their draft forwards, and what drafting costs.

Engines need this if the host must choose a step's draft forwards and nodes before it has a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dyntree_plugin.tree.budget.row_cost import MEMORY, followed

STEP = 0.1
"""Weight of a step in averages."""
FIRST_FORWARD_SECONDS = 1e-3
"""Seconds of a draft forward and its growth, until measured."""
ALIKE = 0.25
"""Variance of the number of forwards that counts as much as that all forwards take alike."""

Forwards = TypeVar("Forwards", float, np.ndarray)


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


class DraftingSeconds:
    """The seconds of a step's drafting by its forwards, by the size of the batch.

    The first forward, with look-up and whatever else a step has once, takes another time than each
    further one. Both follow from recent steps by least squares. As long as these made the same
    number of forwards, all forwards count alike.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Line] = {}

    def observe(self, requests: int, forwards: int, seconds: float) -> None:
        """Learn from a step's drafting; the forward over emitted tokens is among ``forwards``."""
        self._known.setdefault(requests.bit_length(), _Line()).observe(forwards, seconds)

    def of(self, requests: int, further: Forwards) -> Forwards:
        """Return the seconds of 1 + ``further`` forwards in the most similar batches."""
        nearest = min(self._known, key=lambda kind: abs(kind - requests.bit_length()), default=None)
        if nearest is None:
            return FIRST_FORWARD_SECONDS * (1.0 + further)
        return self._known[nearest].at(1.0 + further)


@dataclass
class _Line:
    """Means, variance and covariance of forwards and seconds over recent steps."""

    times: int = 0
    forwards: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    @property
    def slope(self) -> float:
        alike = self.seconds / self.forwards
        slope = (self.covariance + ALIKE * alike) / (self.variance + ALIKE)
        most = self.seconds / (self.forwards - 1) if self.forwards > 1 else alike
        return min(max(slope, 0.0), most)

    def at(self, forwards: Forwards) -> Forwards:
        return self.seconds + self.slope * (forwards - self.forwards)

    def observe(self, forwards: int, seconds: float) -> None:
        # The first observations may be far off.
        memory = min(1.0 + self.times, MEMORY)
        if self.times > MEMORY and (expected := self.at(forwards)) > 0:
            seconds = followed(expected, seconds, 1.0)
        others, above = forwards - self.forwards, seconds - self.seconds
        self.times += 1
        self.forwards += others / memory
        self.seconds += above / memory
        kept = 1 - 1 / memory
        self.variance = kept * (self.variance + others * others / memory)
        self.covariance = kept * (self.covariance + others * above / memory)
