"""Choose how many nodes a step verifies, and how many draft forwards grow the next trees.

A step is expected to emit one token per request and the sum of its nodes' values (Wald's identity
along the accepted path). Its time grows with its rows. The best choice makes the most tokens per
second.

`drafting_rates` tells of every choice before a tree is grown. `best_cut` and `frontier_gain` choose
when trees exist. OPT-Tree (arXiv 2406.17276) cuts one tree in this
way; here the trees of a batch compete for rows.

A tree's nodes are in the order of their values, so its first n nodes are its best tree of n.
Cutting trees to their most valuable nodes is exact for rule ``match``, whose tokens no tree can
change. It is biased for rules that read draws, since a node's value depends on what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np


@cache
def node_buckets(node_budget: int, *, fill_tiles: bool = False) -> tuple[int, ...]:
    """Return the tree sizes that the scheduler may choose: 0, powers of two, and the full budget.

    ``fill_tiles``: one less than each power, so that a tree and its root fill tiles of a GPU's
    kernels. There each size has separate graphs.
    """
    powers = (1 << power for power in range((node_budget - 1).bit_length()))
    sizes = (2 * power - 1 if fill_tiles else power for power in powers)
    return (0, *(size for size in sizes if size < node_budget), node_budget)


def drafting_rates(
    worth: np.ndarray,
    requests: int,
    row_seconds: np.ndarray,
    drafting_seconds: np.ndarray,
    sizes: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens per second of a step by its draft forwards and the nodes of each tree, and
    its seconds, both [F + 1, sizes].

    Args:
        worth: [F + 1, sizes], mean tokens that trees of a size add, by their draft forwards.
        requests: number of requests of the step.
        row_seconds: seconds of a step without drafting, by its rows, up to the most rows that a
            step holds. More rows take several steps.
        drafting_seconds: [F + 1], seconds of the catch-up and so many further draft forwards.
        sizes: nodes of a tree.
    """
    rows = requests * (1 + np.array(sizes))
    held = np.minimum(rows, len(row_seconds) - 1)
    verifying = row_seconds[held] * rows / held
    seconds = verifying + drafting_seconds[:, None]
    return requests * (1 + worth) / seconds, seconds


@dataclass(frozen=True)
class Cut:
    """Nodes that each request verifies, ``counts`` int64 [R].

    The step is expected to emit ``tokens`` in ``seconds``.
    """

    counts: np.ndarray
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def best_cut(
    values: np.ndarray,
    row_seconds: np.ndarray,
    spent: float,
    rate: float | None = None,
) -> Cut:
    """Return the cut of R trees that makes the most tokens per second; of equals, the smallest.

    With ``rate``, return the cut that makes the most tokens beyond what the step's time is worth
    at that rate. This maximises the rate of many steps together (Dinkelbach, "On Nonlinear
    Fractional Programming", 1967): if trees differ from step to step, by up to 2 % over the best
    of each step.

    Args:
        values: [R, N], chance that each node's path is accepted. A request's values must not rise
            from one node to the next. Padding has 0, and is never verified.
        row_seconds: seconds that verification takes by its rows, from 0 up to the most rows that a
            step holds, which is at least R.
        spent: seconds of the rest of the step, its drafting included.
        rate: average tokens per second of recent steps.

    Raises:
        ValueError: if values rise, or ``row_seconds`` is too short or not positive.
    """
    requests, nodes = values.shape
    if (np.diff(values, axis=1) > 0).any():
        raise ValueError("values must not rise from one node of a request to its next")
    room = len(row_seconds) - 1 - requests
    if room < 0:
        raise ValueError(f"row_seconds has {len(row_seconds)} entries for {requests} requests")
    flat = values.ravel()
    # A stable sort keeps the order of equal values within a request.
    order = np.argsort(-flat, kind="stable")[: min(np.count_nonzero(flat), room)]
    tokens = requests + np.concatenate([[0.0], np.cumsum(flat[order], dtype=np.float64)])
    seconds = spent + row_seconds[requests : requests + len(tokens)]
    if not (seconds > 0).all():
        raise ValueError("a step must take some time")
    most = int(np.argmax(tokens / seconds if rate is None else tokens - rate * seconds))
    counts = np.bincount(order[:most] // nodes, minlength=requests) if nodes else np.zeros(requests)
    return Cut(counts.astype(np.int64), float(tokens[most]), float(seconds[most]))


def frontier_gain(frontier: np.ndarray, row_tokens: float) -> float:
    """Return the most tokens that one more draft forward can earn beyond its nodes' rows.

    The values of a node's children add up to at most the node's value, and each child takes a row
    to verify. If this forward does not pay, no later one does, since its nodes are worth no more.

    Args:
        frontier: values of the nodes that the forward would expand; 0 for padding.
        row_tokens: tokens that the time of one more row is worth.
    """
    return float(np.maximum(frontier - row_tokens, 0.0).sum())
