"""The choice of the nodes that a step verifies: one best-first choice over the whole batch.

The nodes of a tree stand in the order of their values, so its first n nodes are its best tree of
n. A step that verifies some nodes of every request is expected to emit one token per request and
the sum of the nodes' values (Wald's identity along the accepted path). Its time grows with its
rows. So the best nodes to verify are the most valuable ones of the whole batch, and as many of
them as make the most tokens per second. OPT-Tree (arXiv 2406.17276) chooses so for one request;
here the requests of the batch compete for rows.

Cutting by value is exact for rule ``match``, whose tokens no tree can change. It is biased for
rules that reason about draws: a node's value tells what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cut:
    """The number of nodes that each of R requests verifies, ``counts`` int64 [R], and the expected
    ``tokens`` and ``seconds`` of that step."""

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
    """Return the cut of R trees that makes the most tokens per second; of equal ones, the smallest.

    ``rate`` is the tokens per second of the steps around this one. A node costs the tokens that
    those steps make in its time. Many steps together make the most tokens if each makes the most
    beyond that cost (Dinkelbach, "On Nonlinear Fractional Programming", 1967). Where trees differ,
    that gives up to 2 % more than if each step made the most per second of its own, which a
    ``rate`` of None asks for.

    ``values`` [R, N] are the estimated chances that the path down to a node is accepted. They must
    not rise from one node of a request to its next, and are 0 for padding, which is never
    verified. ``row_seconds`` [more than R] are the seconds that the verification of 0, 1, … rows
    takes, up to the most that a step holds. ``spent`` are the seconds of the rest of the step, its
    drafting included.

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
    """The number of draft ``forwards`` after the prefill of emitted tokens, and the number of
    ``nodes`` that each tree verifies."""

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
    """Return the drafting that makes the most tokens per second.

    Of equal ones it is that of the fewest forwards.

    It serves engines whose host must choose for all trees before it sees any. ``worth``
    [F + 1, sizes] are the mean tokens that the first nodes of a tree add, by the forwards that
    drafted the tree and by the number of nodes; see `worth_by_forwards`. ``row_seconds`` are the
    seconds of steps without drafting by their rows, up to the most that a step holds; more rows
    take several such steps. ``forward_seconds`` are those of one forward. There is one forward
    more than chosen, which reads the emitted tokens. ``forwards`` are those to choose from; None
    is all.
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
    """Return whether one more draft forward can earn more tokens than its time would elsewhere.

    ``frontier`` are the values of the nodes that the forward would expand. The chances of a node's
    children add up to 1 at most, so their values add up to the node's at most. Each takes a row to
    verify, of ``row_seconds``. Time is worth ``rate`` tokens per second. If this forward does not
    pay, later ones do not either, since their nodes are worth no more.
    """
    gain = np.maximum(frontier - rate * row_seconds, 0.0).sum()
    return bool(gain > rate * forward_seconds)
