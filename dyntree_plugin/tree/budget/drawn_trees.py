"""Choose how far to draft drawn trees, and how many of their nodes to verify.

Both follow from what earlier trees were worth, and not from what a step draws: that may not decide
which nodes are kept.
"""

from __future__ import annotations

import numpy as np

from dyntree_plugin.tree.budget.chains import SLACK, Limits, valued_counts
from dyntree_plugin.tree.budget.choice import best_drafting
from dyntree_plugin.tree.budget.worth import TreeWorth, batch_worth

FIRST_TREES = 4
"""Trees to draft with the most forwards before their worth decides about forwards."""

FURTHER, FURTHER_EVERY = 2, 8
"""Draft further by so many forwards than seems best, once in so many steps, to learn their worth.
Where a forward takes 2 % of a step, that costs 0.5 %."""


class DrawnTreeChoice:
    """Learns what trees are worth by their forwards and nodes, and chooses both together.

    If each were chosen for the other as it is, few forwards and few nodes would keep each other.
    """

    def __init__(self, forwards: int) -> None:
        """``forwards``: the most after the catch-up."""
        self.forwards = self._most = forwards
        """Draft forwards of the last choice."""
        self.rate: float | None = None
        """Tokens per second that were expected of it; None as long as trees are kept whole."""
        self._worth = TreeWorth(forwards)
        self._nodes = 0
        self._choices = 0

    def choose(self, requests: int, row_seconds: np.ndarray, forward_seconds: float) -> None:
        """Choose for a step of ``requests``; the arguments are those of `best_drafting`."""
        worth, self._choices = self._worth.table, self._choices + 1
        if worth is None:
            return
        sizes = range(min(worth.shape[1], max((len(row_seconds) - 1) // requests, 1)))
        given = worth[:, : len(sizes)], requests, row_seconds, forward_seconds, sizes
        best = best_drafting(*given)
        if self._worth.whole_trees < FIRST_TREES:
            best = best_drafting(*given, range(self._most, self._most + 1))
        elif self._choices % FURTHER_EVERY == 0:
            further = min(self._most, best.forwards + FURTHER)
            best = best_drafting(*given, range(further, further + 1))
        self.forwards, self._nodes, self.rate = best.forwards, best.nodes, best.rate

    def cut(
        self, chances: np.ndarray, drawn: np.ndarray, needed: np.ndarray, forwards: int
    ) -> np.ndarray:
        """Return how many nodes to verify of trees that were drawn, int64 [R]; 0 of others. Learn.

        Args:
            chances: [R, N], values of nodes, which fall; 0 for padding.
            drawn: bool [R].
            needed: [R, N], draft forwards that each node needs.
            forwards: that the trees were drafted with.
        """
        requests, nodes = chances.shape
        counts = np.zeros(requests, dtype=np.int64)
        limits = Limits(0.0, requests * nodes)
        if self.rate is not None and self._worth.table is not None:
            row = self._worth.table[self.forwards]
            last = row[self._nodes] - row[self._nodes - 1] if self._nodes else 1.0
            limits = Limits(SLACK * float(last), requests * self._nodes)
        counts[drawn] = valued_counts(chances[drawn], limits)
        self._worth.observe(batch_worth(chances, needed, forwards), requests)
        return counts
