"""Choose how many nodes of drawn chains and trees a step verifies.

Whether a chain ends must be decided before its next token is drawn
(`tests/unit/tree/papers/test_traversal.py` enumerates it). So chains are cut level by level, by the
chances of that level and by limits from earlier batches of about the same size. The nodes of
batches are sorted by chance and averaged. The limits are the number of nodes that makes the most
tokens per second of these averages, and the chance of the last. Trees are cut to their most
valuable nodes by limits from earlier steps, too (`drawn_trees`): what a node draws changes the
values of nodes of less value alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STEP = 0.1
"""Weight of a step in averages."""

SLACK = 0.5
"""A chain ends if its next token has less than this share of the mean chance at the limit. A share
of 1 would leave rows unused in most steps."""

FIRST_RATIO = 0.8
"""Chance of a token given the one before it, until one was observed."""


class Limits(NamedTuple):
    """``least``: a chain ends at a token of less chance. ``nodes``: most nodes of the batch."""

    least: float
    nodes: int


def level_counts(chances: np.ndarray, limits: Limits) -> np.ndarray:
    """Return how many tokens of each chain to verify, int64 [R].

    Args:
        chances: [R, D], estimated chance that the chain is accepted up to each token, computed
            before the token is drawn; 0 where nothing was drawn.
        limits: computed before any token was drawn.
    """
    counts = np.zeros(len(chances), dtype=np.int64)
    room = limits.nodes
    for depth, level in enumerate(chances.T):
        here = np.where(counts == depth, level, 0.0)  # a chain that has ended does not go on
        going = (here >= limits.least) & (here > 0)
        going[np.argsort(-here, kind="stable")[room:]] = False
        counts += going
        room -= int(going.sum())
    return counts


def valued_counts(chances: np.ndarray, limits: Limits) -> np.ndarray:
    """Return how many nodes of each tree to verify, int64 [R]; arguments as for `level_counts`.

    ``chances``: [R, N], which fall from one node of a tree to the next.
    """
    flat = chances.ravel()
    best = np.argsort(-flat, kind="stable")[: limits.nodes]
    best = best[(flat[best] >= limits.least) & (flat[best] > 0)]
    return np.bincount(best // chances.shape[1], minlength=len(chances))


class ChainLimits:
    """Learns the limits for each number of requests."""

    def __init__(self, depth: int) -> None:
        """``depth``: the most tokens of a chain."""
        self._depth = depth
        self._mean: dict[int, np.ndarray] = {}
        self._ratio = FIRST_RATIO

    def of(
        self, requests: int, nodes: int, row_seconds: np.ndarray, spent: float
    ) -> tuple[Limits, float]:
        """Return the limits of a batch, and the tokens per second that are expected with them.

        Averages do not depend on a step's draws, so the limits that make the most of them per
        second are also best for many steps together.

        Args:
            requests: of the batch.
            nodes: the most of each request.
            row_seconds: seconds that verification takes by its rows.
            spent: seconds of the rest of a step, its drafting included.
        """
        mean = self._usual(requests, nodes)[: max(len(row_seconds) - 1 - requests, 0)]
        tokens = requests + np.concatenate([[0.0], np.cumsum(mean)])
        rates = tokens / (spent + row_seconds[requests : requests + len(tokens)])
        most = int(np.argmax(rates))
        least = SLACK * float(mean[most - 1]) if most else 1.0
        return Limits(least, most), float(rates[most])

    def cut(
        self, chances: np.ndarray, chains: np.ndarray, row_seconds: np.ndarray, spent: float
    ) -> np.ndarray:
        """Return how many nodes to verify of what was drawn, int64 [R]; 0 of others. Then learn.

        Args:
            chances: [R, N], of trees and chains, as ``values`` of `best_cut`.
            chains: bool [R], which of them were drawn.
            row_seconds: as in `of`.
            spent: as in `of`, of an earlier step: how far this one drafted depends on its draws.
        """
        counts = np.zeros(len(chances), dtype=np.int64)
        if chains.any():
            limits, _ = self.of(len(chances), chances.shape[1], row_seconds, spent)
            counts[chains] = level_counts(chances[chains], limits)
            self._observe(chances, chains)
        return counts

    def _usual(self, requests: int, nodes: int) -> np.ndarray:
        """Return the mean values of a batch's nodes, which fall, [requests * nodes].

        If no batch had as many requests, they are those of the nearest number, or at the very first
        those of chains of the first ratio.
        """
        if not self._mean:
            return np.repeat(FIRST_RATIO ** np.arange(1, nodes + 1), requests)
        nearest = min(self._mean, key=lambda known: abs(known - requests))
        similar: np.ndarray = self._mean[nearest][np.arange(requests * nodes) * nearest // requests]
        return similar

    def _observe(self, chances: np.ndarray, chains: np.ndarray) -> None:
        chances = chances.copy()
        chances[chains] = self._whole(chances[chains])
        ordered = np.sort(chances, axis=None)[::-1]
        mean = self._usual(len(chances), chances.shape[1]) if self._mean else ordered
        self._mean[len(chances)] = mean + STEP * (ordered - mean)

    def _whole(self, chances: np.ndarray) -> np.ndarray:
        """Return the ``chances`` [R, N] of chains, continued at the usual ratio.

        If tokens that were not drafted had no chance, chains would never become longer.
        """
        drafted = (chances > 0).sum(axis=1, keepdims=True)
        going_on = chances[:, 1:] > 0
        above = chances[:, :-1][going_on].sum()
        if above > 0:
            self._ratio += STEP * (chances[:, 1:][going_on].sum() / above - self._ratio)
        last = np.take_along_axis(chances, np.maximum(drafted - 1, 0), axis=1)
        place = np.arange(chances.shape[1])
        later = last * self._ratio ** np.maximum(place - drafted + 1, 0)
        return np.where((place >= drafted) & (place < self._depth), later, chances)


def expected_tokens(chances: np.ndarray, counts: np.ndarray) -> float:
    """Return the tokens that R requests are expected to emit with their first ``counts`` nodes.

    ``chances``: [R, N], as ``values`` of `best_cut`.
    """
    verified = np.arange(chances.shape[1]) < counts[:, None]
    return float(len(chances) + chances[verified].sum())
