"""How many tokens of drawn chains a step verifies.

Where a chain ends has to be decided before the token that would follow is drawn (`tree.block`). So
chains are cut level by level, by the chances of that level and by limits that come from earlier
steps. These limits follow from the mean chances of earlier batches of as many requests: the number
of rows at which they make the most tokens beyond what the step's time is worth, and the chance of
the last node among them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STEP = 0.1
"""Weight of a step in the mean chances."""

SLACK = 0.5
"""Nodes down to this share of the mean chance at the limit are verified while there is room: most
steps would else leave rows unused."""


FIRST_RATIO = 0.8
"""Chance of a token after the one before it, until one was seen."""


class Limits(NamedTuple):
    """``least``: chance of a node below which a chain ends. ``nodes``: of all requests."""

    least: float
    nodes: int


def level_counts(chances: np.ndarray, limits: Limits) -> np.ndarray:
    """Return how many tokens of each chain to verify, int64 [R].

    Args:
        chances: [R, D], estimated chance of each token that the chain is accepted up to it, known
            before the token is drawn; 0 where nothing was drawn.
        limits: known before any token was.
    """
    counts = np.zeros(len(chances), dtype=np.int64)
    room = limits.nodes
    for level in chances.T:
        # A chain that has ended does not go on.
        here = np.where(counts == counts.max(initial=0), level, 0.0)
        going = (here >= limits.least) & (here > 0)
        going[np.argsort(-here, kind="stable")[room:]] = False
        counts += going
        room -= int(going.sum())
        if not going.any():
            break
    return counts


class ChainLimits:
    """Learns the limits of batches by their number of requests."""

    def __init__(self) -> None:
        self._mean: dict[int, np.ndarray] = {}
        self._ratio = FIRST_RATIO

    def of(self, requests: int, row_seconds: np.ndarray, rate: float | None) -> Limits | None:
        """Return the limits of a batch, None while nothing is known of such batches.

        Args:
            requests: of the batch.
            row_seconds: seconds that verification takes by its rows.
            rate: tokens per second of the steps around this one.
        """
        mean = self._mean.get(requests)
        if mean is None or rate is None:
            return None
        mean = mean[: max(len(row_seconds) - 1 - requests, 0)]
        gains = np.concatenate([[0.0], np.cumsum(mean)])
        nodes = int(np.argmax(gains - rate * row_seconds[requests : requests + len(gains)]))
        return Limits(SLACK * float(mean[nodes - 1]) if nodes else 1.0, nodes)

    def observe(self, chances: np.ndarray, chains: np.ndarray) -> None:
        """Learn from the ``chances`` [R, N] of a step's nodes, of trees and of ``chains`` [R].

        What was not drafted of a chain is taken to go on by the usual ratio: chains would never
        become longer if it were nothing.
        """
        chances = chances.copy()
        chances[chains] = self._whole(chances[chains])
        found = np.sort(chances, axis=None)[::-1]
        mean = self._mean.setdefault(len(chances), found.copy())
        mean += STEP * (found - mean)

    def _whole(self, chances: np.ndarray) -> np.ndarray:
        """Return the ``chances`` [R, D] of chains, with those of what was not drafted."""
        drafted = (chances > 0).sum(axis=1, keepdims=True)
        going_on = chances[:, 1:] > 0
        above = chances[:, :-1][going_on].sum()
        if above > 0:
            self._ratio += STEP * (chances[:, 1:][going_on].sum() / above - self._ratio)
        last = np.take_along_axis(chances, np.maximum(drafted - 1, 0), axis=1)
        beyond = np.arange(chances.shape[1]) - drafted + 1
        later = np.where(drafted > 0, last, 0.0) * self._ratio ** np.maximum(beyond, 0)
        return np.where(beyond > 0, later, chances)
