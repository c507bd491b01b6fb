"""What trees are worth by how far they are drafted, and what drafting costs, learned from trees.

For where the host must say how many draft forwards and nodes a step has before it sees a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dyntree_plugin.tree.budget.row_cost import MEMORY, followed

STEP = 0.1
"""Weight of an observation in averages, where every step brings one."""
FIRST_TREES = 32
"""Trees that are to be drafted whole before anything is chosen by what they were worth."""


def worth_by_forwards(
    chances: np.ndarray, depths: np.ndarray, forwards: int, sizes: Sequence[int]
) -> np.ndarray:
    """Mean worth of R trees, had fewer draft forwards drafted them, [forwards + 1, sizes].

    A tree's worth is the tokens that its nodes are expected to add: the sum of their values. Entry
    [f, i] is that of the first ``sizes[i]`` nodes of depth f + 1 at most: the k-th forward is the
    first that nodes of depth k + 1 can come from. ``chances``, ``depths`` [R, N]: value and depth
    of nodes in the order of their values, 0 and anything for padding. Approximate in two ways:
    nodes of that depth that a later forward brought are counted (too much), and what they drove out
    of the tree is not (too little).
    """
    reached = depths <= 1 + np.arange(forwards + 1)[:, None, None]
    place = reached.cumsum(axis=2)
    sums = [(chances * (reached & (place <= size))).sum(axis=2).mean(axis=1) for size in sizes]
    return np.stack(sums, axis=1)


class TreeWorth:
    """Averages of `worth_by_forwards` over trees that are seldom drafted as far as they could be.

    Beyond what was drafted, the last known ratios hold.
    """

    def __init__(self, forwards: int) -> None:
        """``forwards``: the most."""
        self.table: np.ndarray | None = None
        """[forwards + 1, sizes]; None before the first observation."""
        self.whole_trees = 0
        """Trees seen that every forward had drafted."""
        self._forwards = forwards
        self._times = np.zeros(forwards + 1)
        self._age = np.zeros(forwards + 1)

    def observe(self, seen: np.ndarray, trees: int) -> None:
        """Learn from the mean worth ``seen`` [f + 1, sizes] of so many ``trees`` that f forwards
        drafted."""
        drafted = len(seen)
        if drafted > self._forwards:
            self.whole_trees += trees
        if self.table is None:
            self.table = np.pad(seen, ((0, 1 + self._forwards - drafted), (0, 0)), mode="edge")
        old = self.table.copy()
        self._age += 1
        self._times[:drafted] += 1
        # What was not seen for long is replaced by what many trees say, not by one of them.
        weight = 1 - (1 - STEP) ** np.minimum(self._age[:drafted], trees)
        weight = np.maximum(weight, 1 / self._times[:drafted])[:, None]
        self.table[:drafted] += weight * (seen - old[:drafted])
        last = drafted - 1
        ratio = np.where(old[last] > 0, self.table[last] / np.maximum(old[last], 1e-9), 1.0)
        self.table[drafted:] *= ratio
        # More forwards never make a tree worth less.
        np.maximum.accumulate(self.table, axis=0, out=self.table)
        self._age[:drafted] = 0


class ForwardSeconds:
    """Seconds of a draft forward with the growth behind it, by the size of the batch."""

    def __init__(self) -> None:
        # Batches of about the same size: the average, and how often it was seen.
        self._known: dict[int, tuple[float, int]] = {}

    def observe(self, requests: int, forwards: int, seconds: float) -> None:
        """Learn from the drafting of a step, the catch-up's forward among its ``forwards``."""
        each, kind = seconds / forwards, requests.bit_length()
        average, times = self._known.get(kind, (each, 0))
        # What was seen first may be far off.
        memory = min(1.0 + times, MEMORY)
        self._known[kind] = followed(average, each, memory), times + 1

    def of(self, requests: int) -> float | None:
        """Of the most similar batches that were seen; None before any was."""
        nearest = min(self._known, key=lambda kind: abs(kind - requests.bit_length()), default=None)
        return None if nearest is None else self._known[nearest][0]
