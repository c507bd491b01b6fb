"""The choice of a step's tree size and number of draft forwards.

A step that verifies n nodes of each tree is expected to emit one token per request and the sum of
the nodes' values (Wald's identity along the accepted path). Its time grows with its rows. The best
choice makes the most tokens per second.

Cutting trees to their most valuable nodes is exact for rule ``match``, whose tokens no tree can
change. It is biased for rules that reason about draws: a node's value tells what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def node_buckets(node_budget: int) -> tuple[int, ...]:
    """Return the tree sizes that the scheduler may choose: 0, powers of two, and the full budget.

    On CUDA each size has graphs of its own.
    """
    powers = (1 << power for power in range((node_budget - 1).bit_length()))
    return (0, *powers, node_budget)


@dataclass(frozen=True)
class Drafting:
    """A choice: draft ``forwards`` after the catch-up, and ``nodes`` that each tree verifies."""

    forwards: int
    nodes: int


def best_drafting(
    worth: np.ndarray,
    requests: int,
    row_seconds: np.ndarray,
    forward_seconds: float,
    sizes: Sequence[int],
    forwards: Sequence[int] | None = None,
) -> Drafting:
    """Return the choice that makes the most tokens per second; of equals, the fewest forwards.

    Args:
        worth: [F + 1, sizes], mean tokens that trees of a size add, by the forwards that drafted
            them.
        requests: of the step.
        row_seconds: seconds of a step without drafting, by its rows, up to the most rows that a
            step holds. More rows take several steps.
        forward_seconds: seconds of one draft forward. The catch-up is one more.
        sizes: nodes of a tree to choose from.
        forwards: numbers of forwards to choose from; None for all.
    """
    allowed = np.arange(len(worth)) if forwards is None else np.asarray(forwards)
    rows = requests * (1 + np.asarray(sizes))
    held = np.minimum(rows, len(row_seconds) - 1)
    verifying = row_seconds[held] * rows / held
    drafting = forward_seconds * (1 + allowed)
    rates = (1 + worth[allowed]) / (verifying + drafting[:, None])
    best, size = np.unravel_index(int(np.argmax(rates)), rates.shape)
    return Drafting(int(allowed[best]), int(sizes[int(size)]))
