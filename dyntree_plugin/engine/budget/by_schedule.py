"""The adaptive node budget: one size and one number of draft forwards for all trees of a step."""

from __future__ import annotations

import time

import numpy as np

from dyntree_plugin.engine.telemetry.counts import MOST_SAMPLED, WorkerCounts
from dyntree_plugin.tree.budget.learned import Chosen, LearnedChoice
from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds
from dyntree_plugin.tree.budget.worth import DraftingSeconds

FORWARDS = "dyntree_forwards"
"""Attribute of a SchedulerOutput: the most draft forwards after the catch-up."""


class NodeBuckets:
    """The table in which vLLM's scheduler looks up the nodes of a request, by number of requests.

    It replaces the table of vLLM's batch-size schedule (`dynamic_sd_lookup`), and also chooses the
    number of draft ``forwards``. From outputs it learns what trees were worth, how long draft
    forwards took, and how long steps took: the time from one output to the next. With asynchronous
    scheduling outputs come a step or two late.
    """

    def __init__(self, sizes: tuple[int, ...], forwards: int, *, synchronous: bool = False) -> None:
        """``sizes``: nodes to choose from, ascending. ``forwards``: the most after the catch-up.
        ``synchronous``: a step's output comes after its drafting, not before."""
        self.sizes = sizes
        self.forwards = forwards
        """Draft forwards of the last choice."""
        self._most = forwards
        self._synchronous = synchronous
        self._fewest = 0
        self._cost: RowCost | None = None
        self._choice = LearnedChoice(forwards, sizes)
        self._drafting_seconds = DraftingSeconds()
        self._context = 0.0
        self._came: float | None = None

    def __getitem__(self, requests: int) -> int:
        """Choose the nodes of each request for a step of ``requests``."""
        chosen = self._choose(requests)
        self.forwards = chosen.forwards
        return chosen.nodes

    def _choose(self, requests: int) -> Chosen:
        cost = self._cost
        if cost is None:
            return Chosen(self._most, self.sizes[-1])
        # A choice looks no further: a kernel that is faster with more rows has up to twice as many.
        most = 2 * requests * (1 + self.sizes[-1])

        def curve(optimism: float) -> np.ndarray:
            return cost.seconds(most, self._context, optimism)

        drafting = self._drafting_seconds.of(requests, np.arange(1 + self._most))
        return self._choice.choose(requests, curve, drafting, self._fewest)

    def measured(self, cost: RowCost, fewest_forwards: int = 0) -> None:
        """Use the costs that were measured at start-up, and the fewest forwards of a step."""
        self._cost, self._fewest = cost, fewest_forwards

    def observe(self, counts: WorkerCounts, rows: int) -> StepSeconds | None:
        """Learn from the output of a step of ``rows``.

        Return its seconds; None if nothing was expected of it.
        """
        now, before = time.perf_counter(), self._came
        if counts.replaced:  # The worth of trees is another, and the engine may have paused.
            self._choice, before = LearnedChoice(self._most, self.sizes), None
        for of_step in counts.drafted:
            self._drafting_seconds.observe(*of_step)
        # After a step with prompts, the time to the next output is not that of decoding.
        decoding = all(counts.decoding)
        self._came = now if decoding else None
        if not decoding:
            return None
        self._context, requests = counts.context, len(counts.decoding)
        if counts.worth and counts.verified and counts.growth_forwards is not None:
            known = len(counts.worth) if counts.ended_early else counts.growth_forwards + 1
            trees = min(requests, MOST_SAMPLED)
            self._choice.observe(np.asarray(counts.worth)[:known], requests, trees)
        if self._cost is None or before is None:
            return None
        # Asynchronously, the trees of a step are drafted after the output of the one before.
        forwards = 1 + (counts.growth_forwards or 0)
        if self._synchronous:  # Look-up alone counts as a forward.
            forwards = max(counts.draft_forwards, int(counts.growth_forwards is not None))
        drafted = self._drafting_seconds.of(requests, forwards - 1) if forwards else 0.0
        spent = max(now - before - drafted, 1e-6)
        expected = self._cost.observe(rows, spent, self._context) + drafted
        return StepSeconds(expected, now - before, self._choice.take_lost())
