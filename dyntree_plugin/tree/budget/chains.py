"""Choose how many nodes of drawn chains and trees a step verifies.

Whether a chain ends must be decided before its next token is drawn
(`tests/unit/tree/papers/test_traversal.py` enumerates it). So the chains of a batch are cut level
by level. Their later tokens are foreseen at the usual ratio. The best cut is found with these, as
in `choice.best_cut`, at the average rate of recent steps; a chain goes on if that cut verifies more
of it. So a row that does not pay alone is verified if it pays together with later ones, as where a
kernel computes rows in blocks.

Trees are cut to their most valuable nodes, each above a limit that follows from earlier steps: what
a node draws changes the values of nodes of less value alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STEP = 0.1
"""Weight of a step in averages."""

LOOK_AHEAD = 32
"""Nodes of trees that are foreseen. The blocks of rows of kernels are of 16 or 32."""

FIRST_RATIO = 0.8
"""Chance of a token given the one before it, until one was observed."""


class Prices(NamedTuple):
    """What going on costs. It depends on no token that the step draws.

    ``row_seconds``: seconds that verification takes by its rows, which end with the most rows of a
    step. ``forward``: seconds of a draft forward. ``rate``: tokens per second that a step's time is
    worth. ``ratio``: chance of a token given the one before it.
    """

    row_seconds: np.ndarray
    forward: float
    rate: float
    ratio: float


def going_on(
    chances: np.ndarray, left: int, rows: int, prices: Prices, *, drafted: bool = True
) -> np.ndarray:
    """Return which chains go on with their next token, bool [R].

    Args:
        chances: [R], estimated chance that each chain is accepted up to that token, computed before
            the token is drawn; 0 of chains that have ended.
        left: most tokens that a chain may still get, at least 1.
        rows: of the step so far.
        prices: of rows and forwards.
        drafted: whether this level needs no forward.
    """
    later = chances[:, None] * prices.ratio ** np.arange(left)
    room = max(len(prices.row_seconds) - 1 - rows, 0)
    order = np.argsort(-later, axis=None, kind="stable")[: min(np.count_nonzero(later), room)]
    chain, level = np.divmod(order, left)
    forwards = np.maximum.accumulate(level) + (not drafted)
    after = prices.row_seconds[rows + 1 : rows + 1 + len(order)] - prices.row_seconds[rows]
    gains = np.cumsum(later.ravel()[order]) - prices.rate * (after + prices.forward * forwards)
    found = np.zeros(len(chances), dtype=bool)
    if (gains > 0).any():
        found[chain[: 1 + int(np.argmax(gains))]] = True
    return found


def level_counts(chances: np.ndarray, rows: int, prices: Prices) -> np.ndarray:
    """Return how many tokens of each chain to verify, int64 [R].

    Args:
        chances: [R, D], of chains of up to D tokens, as in `going_on`; 0 where nothing was drawn.
        rows: of the step beside.
        prices: of rows and forwards.
    """
    counts = np.zeros(len(chances), dtype=np.int64)
    for depth, level in enumerate(chances.T):
        here = np.where(counts == depth, level, 0.0)  # a chain that has ended does not go on
        going = going_on(here, chances.shape[1] - depth, rows, prices)
        if not going.any():
            break
        counts += going
        rows += int(going.sum())
    return counts


def least_values(mean: np.ndarray, rows: int, row_seconds: np.ndarray, rate: float) -> np.ndarray:
    """Return the least values of the batch's nodes that pay, from the most valuable one on, [M].

    A node pays if it and those after it, foreseen from the usual values, earn their rows.

    Args:
        mean: [M], usual values of the nodes, which fall.
        rows: of the step without them.
        row_seconds: seconds that verification takes by its rows, up to the most of a step.
        rate: tokens per second that a step's time is worth.
    """
    mean = np.maximum(mean[: max(len(row_seconds) - 1 - rows, 0)], 1e-9)
    ahead = np.arange(len(mean))[:, None] + np.arange(min(LOOK_AHEAD, len(mean)))
    inside, ahead = ahead < len(mean), np.minimum(ahead, len(mean) - 1)
    later = np.cumsum(np.where(inside, mean[ahead], 0.0), axis=1) / mean[:, None]
    seconds = row_seconds[rows + 1 + ahead] - row_seconds[rows : rows + len(mean), None]
    least: np.ndarray = np.where(inside, rate * seconds / later, np.inf).min(axis=1, initial=np.inf)
    return least


def valued_counts(chances: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Return how many nodes of each tree to verify, int64 [R].

    Args:
        chances: [R, N], which fall from one node of a tree to the next; 0 where nothing was drawn.
        least: [M], least values from the most valuable node of the batch on, computed before any
            token was drawn. The first node below its own ends all trees.
    """
    flat = chances.ravel()
    order = np.argsort(-flat, kind="stable")[: len(least)]
    ends = (flat[order] < least[: len(order)]) | (flat[order] == 0)
    best = order[: int(ends.argmax())] if ends.any() else order
    return np.bincount(best // chances.shape[1], minlength=len(chances))


class ChainRatio:
    """The chance of a chain's token given the one before it, averaged over recent steps."""

    def __init__(self) -> None:
        self.value = FIRST_RATIO

    def observe(self, chances: np.ndarray) -> None:
        """Learn from ``chances`` [R, D] of chains; 0 where nothing was drawn."""
        above = chances[:, :-1][chances[:, 1:] > 0].sum()
        if above > 0:
            self.value += STEP * (chances[:, 1:].sum() / above - self.value)

    def rate(self, requests: int, depth: int, row_seconds: np.ndarray, spent: float) -> float:
        """Return the tokens per second of chains of the best length at this ratio.

        Args:
            requests: of the batch.
            depth: the most tokens of a chain.
            row_seconds: seconds that verification takes by its rows.
            spent: seconds of the rest of a step.
        """
        lengths = np.arange(1 + max(min(depth, (len(row_seconds) - 1) // requests - 1), 0))
        tokens = requests * np.cumsum(self.value**lengths)
        return float((tokens / (spent + row_seconds[requests * (1 + lengths)])).max())


def expected_tokens(chances: np.ndarray, counts: np.ndarray) -> float:
    """Return the tokens that R requests are expected to emit with their first ``counts`` nodes.

    ``chances``: [R, N], as ``values`` of `best_cut`.
    """
    verified = np.arange(chances.shape[1]) < counts[:, None]
    return float(len(chances) + chances[verified].sum())
