"""Choose how far to draft drawn trees, and how many of their nodes to verify.

Both follow from what earlier trees were worth, and not from what a step draws: that may not decide
which nodes are kept.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np

from dyntree_plugin.tree.budget.chains import least_values, valued_counts
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
        self._worth: dict[int, TreeWorth] = {}
        self._choices = 0

    def choose(self, requests: int, row_seconds: np.ndarray, forward_seconds: float) -> None:
        """Choose for a step of ``requests``; the arguments are those of `best_drafting`."""
        known, self._choices = self._of(requests), self._choices + 1
        worth = known.table
        if worth is None:
            return
        sizes = range(min(worth.shape[1], max((len(row_seconds) - 1) // requests, 1)))
        given = worth[:, : len(sizes)], requests, row_seconds, forward_seconds, sizes
        best = best_drafting(*given)
        if known.whole_trees < FIRST_TREES:
            best = best_drafting(*given, range(self._most, self._most + 1))
        elif self._choices % FURTHER_EVERY == 0:
            further = min(self._most, best.forwards + FURTHER)
            best = best_drafting(*given, range(further, further + 1))
        self.forwards, self.rate = best.forwards, best.rate

    def _of(self, requests: int) -> TreeWorth:
        """Return what is known of batches of about this size, at first that of the most similar."""
        kind = requests.bit_length()
        if kind not in self._worth:
            nearest = min(self._worth, key=lambda other: abs(other - kind), default=None)
            known = TreeWorth(self._most) if nearest is None else deepcopy(self._worth[nearest])
            self._worth[kind] = known
        return self._worth[kind]

    def cut(
        self,
        chances: np.ndarray,
        drawn: np.ndarray,
        needed: np.ndarray,
        forwards: int,
        row_seconds: np.ndarray,
        rate: float | None,
    ) -> np.ndarray:
        """Return how many nodes to verify of trees that were drawn, int64 [R]; 0 of others. Learn.

        Args:
            chances: [R, N], values of nodes, which fall; 0 for padding.
            drawn: bool [R].
            needed: [R, N], draft forwards that each node needs.
            forwards: that the trees were drafted with.
            row_seconds: as in `choose`, without what is beside verification.
            rate: average tokens per second of earlier steps.
        """
        requests, nodes = chances.shape
        counts = np.zeros(requests, dtype=np.int64)
        known, rate = self._of(requests), rate or self.rate
        least = np.zeros(min(requests * nodes, max(len(row_seconds) - 1 - requests, 0)))
        if self.rate is not None and rate is not None and known.table is not None:
            mean = np.diff(known.table[self.forwards]).repeat(requests)
            least = least_values(mean, requests, row_seconds, rate)
        counts[drawn] = valued_counts(chances[drawn], least)
        known.observe(batch_worth(chances, needed, forwards), requests)
        return counts
