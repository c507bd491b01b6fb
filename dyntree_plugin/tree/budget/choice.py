"""How many nodes every request of a batch verifies: ONE best-first choice over all of them.

The nodes of a tree stand in the order of their values, so its first n nodes are its best tree of
n. A step that verifies some nodes of every request is expected to emit one token per request and
the sum of the nodes' values (Wald's identity along the accepted path), and takes a time that grows
with its rows. The most valuable nodes of the whole batch, as many as make the most tokens per
second, are therefore the best that can be verified (as OPT-Tree, arXiv 2406.17276, chooses for one
request; the batch competes for rows).

Cutting by value is exact for rule ``match``, whose tokens no tree can change. It is biased for
rules that reason about draws: a node's value tells what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cut:
    """How many nodes each of R requests verifies, ``counts`` int64 [R], and the expected ``tokens``
    and ``seconds`` of that step."""

    counts: np.ndarray
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def best_cut(
    values: np.ndarray, row_seconds: np.ndarray, spent: float, rate: float | None = None
) -> Cut:
    """The cut of R trees that makes the most tokens per second; of equals, that of fewest nodes.

    ``rate``: tokens per second of the steps around this one. A node costs what they would have made
    in its time, so many steps make the most if each makes the most tokens beyond that (Dinkelbach,
    "On Nonlinear Fractional Programming", 1967): where trees differ, up to 2 % more than if each
    made the most per second of its own, which is what None asks for.

    ``values`` [R, N]: estimated chance that the path down to a node is accepted; they must not rise
    from one node of a request to its next; 0 for padding, which is never verified. ``row_seconds``
    [more than R]: seconds of the verification of so many rows, up to the most that a step holds.
    ``spent``: what the step takes besides, its drafting included.

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
    # Stable: of equal values those of one request keep their order.
    order = np.argsort(-flat, kind="stable")[: min(np.count_nonzero(flat), room)]
    tokens = requests + np.concatenate([[0.0], np.cumsum(flat[order], dtype=np.float64)])
    seconds = spent + row_seconds[requests : requests + len(tokens)]
    if not (seconds > 0).all():
        raise ValueError("a step must take some time")
    most = int(np.argmax(tokens / seconds if rate is None else tokens - rate * seconds))
    counts = np.bincount(order[:most] // nodes, minlength=requests) if nodes else np.zeros(requests)
    return Cut(counts.astype(np.int64), float(tokens[most]), float(seconds[most]))


@dataclass(frozen=True)
class Drafting:
    """How trees are drafted and verified: draft ``forwards`` behind the catch-up's, and ``nodes``
    that each tree verifies."""

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
    """The drafting that makes the most tokens per second, of equals that of fewest forwards.

    For where the host does not see single trees before it must say what all of them get.
    ``worth`` [F + 1, sizes]: mean tokens that the first nodes of trees add that so many forwards
    drafted, as in `worth`. ``row_seconds`` of steps without drafting by their rows, up to the most
    that a step holds; more rows take more of such steps. ``forward_seconds``: of one forward, of
    which there is one more, the catch-up's. ``forwards``: those to choose from; None is all.
    """
    allowed = np.arange(len(worth)) if forwards is None else np.asarray(forwards)
    rows = requests * (1 + np.asarray(sizes))
    held = np.minimum(rows, len(row_seconds) - 1)
    verifying = row_seconds[held] * rows / held
    drafting = forward_seconds * (1 + allowed)
    rates = (1 + worth[allowed]) / (verifying + drafting[:, None])
    best, size = np.unravel_index(int(np.argmax(rates)), rates.shape)
    return Drafting(int(allowed[best]), int(sizes[int(size)]))


def draft_pays(
    frontier: np.ndarray, row_seconds: float, forward_seconds: float, rate: float
) -> bool:
    """Whether one more draft forward can earn more tokens than its time would elsewhere.

    ``frontier``: values of the nodes that it would expand. The chances of a node's children add up
    to 1 at most, so their values add up to the node's; verifying them takes a row each, of
    ``row_seconds``; time is worth ``rate`` tokens per second. Later forwards, whose nodes are worth
    no more, cannot pay where this one does not.
    """
    gain = np.maximum(frontier - rate * row_seconds, 0.0).sum()
    return bool(gain > rate * forward_seconds)
