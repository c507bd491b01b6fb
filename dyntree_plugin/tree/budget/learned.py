"""Choose a step's draft forwards and nodes together, by what earlier trees were worth.

If each were chosen for the other as it is, few forwards and few nodes would keep each other: few
forwards leave few nodes that are worth a row, and few nodes leave further forwards nothing to earn.
A chain is a tree, so chains are chosen by the same law.

Now and then a step tries more rows, or more forwards, than seem best, so that a wrong belief mends
itself. What that is expected to cost is saved up before, as in conservative bandits (Wu et al.,
arXiv 1602.04282): at first the time of `AT_FIRST` steps, and then `SHARE` of all time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from dyntree_plugin.tree.budget.choice import drafting_rates
from dyntree_plugin.tree.budget.drawn import least_values
from dyntree_plugin.tree.budget.worth import STEP, TreeWorth

FIRST_TREES = 4
"""Trees to draft with the most forwards before their worth decides about forwards."""
SHARE = 0.01
"""Most of all time that trying may be expected to cost, half of it for rows and half for forwards,
which must not use up what a dear number of rows waits for."""
AT_FIRST = 2.0
"""Steps whose time is saved up at first, half of it for rows and half for forwards."""
TRIED_EVERY = 8
"""Rows are tried once in so many choices at most, and so are forwards."""
OPTIMISM = 2.0
"""Standard deviations by which the seconds of rows count as less where rows are tried."""
FURTHER = 2
"""So many forwards beyond the best number and beyond twice that are tried, in turns."""

Curve = Callable[[float], np.ndarray]
"""Seconds of a step without drafting by its rows, at an optimism; see `RowCost.seconds`."""


@dataclass(frozen=True)
class Chosen:
    """What a step drafts, and what its time is worth.

    ``forwards``, ``nodes``: what is drafted, and what each tree verifies on average, or at most
    where nodes are kept by a curve of some ``optimism``. ``tries``: whether each tree verifies at
    least one node. ``row_tokens``: what a node has to be worth, or the one that it drives out.
    ``values``: usual values of the nodes of a request, which fall. ``whole``: trees are drafted by
    all ``forwards``, since little is known. As long as nothing is, ``rate`` is None.
    """

    forwards: int
    nodes: int
    rate: float | None = None
    optimism: float = 0.0
    tries: bool = False
    row_tokens: float = 0.0
    values: np.ndarray = field(default_factory=lambda: np.zeros(0))
    whole: bool = False

    def least_values(self, requests: int, nodes: int, row_seconds: np.ndarray) -> np.ndarray:
        """Return the limits of `drawn.valued_counts` for trees of at most so many ``nodes``."""
        room = max(len(row_seconds) - 1 - requests, 0)
        if self.rate is None:
            return np.zeros(min(requests * nodes, room))
        least = least_values(self.values.repeat(requests), requests, row_seconds, self.rate)
        least[: requests * self.tries] = 0.0
        return least


class LearnedChoice:
    """Learns the worth of trees by batch size, and chooses by it.

    ``lost``: seconds that trying was expected to cost, until somebody counts them.
    """

    def __init__(self, forwards: int, sizes: Sequence[int] | None = None) -> None:
        """``forwards``: the most after the catch-up. ``sizes``: nodes of a tree to choose from, as
        in what is observed; None for every number."""
        self.lost = 0.0
        self._most = forwards
        self._sizes = sizes
        self._worth: dict[int, TreeWorth] = {}
        # Mean tokens of a request and seconds of a step.
        self._usual: dict[int, np.ndarray] = {}
        self._choices = 0
        self._saved = np.zeros(2)  # for rows, and for forwards

    def choose(self, requests: int, curve: Curve, drafting: np.ndarray, fewest: int = 0) -> Chosen:
        """Choose for a step of ``requests``; ``drafting`` [most + 1]: seconds of the catch-up and
        so many further forwards, of which it makes at least ``fewest``."""
        known = self._of(requests)
        if known.table is None:
            return Chosen(self._most, self._sizes[-1] if self._sizes else 0, whole=True)
        table, sizes = known.table, self._sizes or range(known.table.shape[1])
        whole = known.whole_trees < FIRST_TREES
        fewest = self._most if whole else fewest
        known_rows = curve(0.0)
        rates, seconds = drafting_rates(table, requests, known_rows, drafting, sizes)
        rates[:fewest] = 0.0
        best = divmod(int(rates.argmax()), len(sizes))
        rate, took = float(rates[best]), float(seconds[best])
        self._choices += 1
        share = SHARE + AT_FIRST * (self._choices == 1)
        self._saved = np.minimum(self._saved + share * took / 2, took)
        hopes, optimism, tries = rates, 0.0, False
        turn = self._choices // TRIED_EVERY % 2
        if self._choices % TRIED_EVERY == 0:
            optimism = OPTIMISM
            hopes, _ = drafting_rates(table, requests, curve(optimism), drafting, sizes)
            # Fewer rows and more take turns, or one side would be tried as long as it is hoped for.
            hopes[:, slice(best[1], None) if turn else slice(1 + best[1])] = 0.0
            hopes[hopes <= rate] = hopes[:fewest] = 0.0
        elif self._choices % TRIED_EVERY == TRIED_EVERY // 2:
            tries, further = True, min(self._most, (1 + turn) * best[0] + FURTHER)
            hopes = np.where(np.arange(len(rates))[:, None] == further, rates, 0.0)
            hopes[:, : int(sizes[0] == 0)] = 0.0
        # The most promising of what can be saved up for is tried once it can be afforded.
        losses = seconds * (1 - rates / rate)
        hopes = np.where((losses <= took) & (rates > 0), hopes, 0.0)
        tried = divmod(int(hopes.argmax()), len(sizes))
        if tried == best or not hopes[tried] or losses[tried] > self._saved[int(tries)]:
            tried, optimism, tries = best, 0.0, False
        self._saved[int(tries)] -= losses[tried]
        self.lost += float(losses[tried])
        forwards, size = tried
        values, nodes = np.diff(table[forwards]), sizes[size]
        if (usual := self._usual.get(requests.bit_length())) is not None:
            rate = requests * float(usual[0] / usual[1])
        of_rows = curve(optimism) if optimism else known_rows
        row = rate * _next_row_seconds(requests * (1 + nodes), of_rows)
        if size and nodes:
            row = min(row, float(values[size - 1]))
        return Chosen(forwards, nodes, rate, optimism, tries, row, values, whole)

    def observe(self, seen: np.ndarray, requests: int, trees: int | None = None) -> None:
        """Learn from a step's trees; ``seen`` and ``trees``: as in `TreeWorth.observe`, by default
        those of all requests."""
        self._of(requests).observe(seen, trees or requests)

    def expect(self, requests: int, tokens: float, seconds: float) -> None:
        """Learn what a step's time is worth where the trees themselves refine what is verified:
        the step of ``requests`` is expected to emit ``tokens`` in ``seconds``."""
        kind, seen = requests.bit_length(), np.array([tokens / requests, seconds])
        usual = self._usual.get(kind, seen)
        self._usual[kind] = usual + STEP * (seen - usual)

    def take_lost(self) -> float:
        """Return ``lost``, and begin again."""
        lost, self.lost = self.lost, 0.0
        return lost

    def _of(self, requests: int) -> TreeWorth:
        """Return what is known of batches of about this size, at first that of the most similar."""
        kind = requests.bit_length()
        if kind not in self._worth:
            nearest = min(self._worth, key=lambda other: abs(other - kind), default=None)
            known = TreeWorth(self._most) if nearest is None else deepcopy(self._worth[nearest])
            self._worth[kind] = known
        return self._worth[kind]


def _next_row_seconds(rows: int, curve: np.ndarray) -> float:
    """Return the seconds of one more row than ``rows``, averaged over as many rows again.

    Kernels take rows by the block, so that the cost of a single row says little. It is never less
    than nothing, as where an optimistic curve falls.
    """
    last = len(curve) - 1
    rows, more = min(rows, last), min(2 * rows, last)
    return max(float(curve[more] - curve[rows]), 0.0) / max(more - rows, 1)
