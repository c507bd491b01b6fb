"""Choose how many nodes of drawn chains and trees a step verifies.

Whether a node stays must be decided before its token is drawn
(`tests/unit/tree/papers/test_traversal.py` enumerates it). So trees are cut to their most valuable
nodes, each above a limit that follows from earlier steps: what a node draws changes the values of
nodes of less value alone.
"""

from __future__ import annotations

import numpy as np

LOOK_AHEAD = 32
"""Nodes of trees that are foreseen. The blocks of rows of kernels are of 16 or 32."""


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
