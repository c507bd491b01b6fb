"""The adaptive node budget: one size and one number of draft forwards for all trees of a step."""

from __future__ import annotations

import time

import numpy as np

from dyntree_plugin.engine.telemetry.counts import WorkerCounts
from dyntree_plugin.tree.budget.choice import DraftingChoice, best_drafting
from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds, optimism
from dyntree_plugin.tree.budget.worth import FIRST_TREES, ForwardSeconds, TreeWorth

FORWARDS = "dyntree_forwards"
"""Attribute of a SchedulerOutput: the most draft forwards after the catch-up."""

FURTHER_EVERY = 64
"""Once in this many steps, draft about twice as far as seems best, and at least two forwards, to
learn what that is worth. That costs less than one step in as many."""


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
        self._worth = TreeWorth(forwards)
        self._forward_seconds = ForwardSeconds()
        self._lookups = 0
        self._context = 0.0
        self._came: float | None = None

    def __getitem__(self, requests: int) -> int:
        """Choose the nodes of each request for a step of ``requests``."""
        self._lookups += 1
        chosen = self._choose(requests)
        self.forwards = chosen.forwards
        return chosen.nodes

    def _choose(self, requests: int) -> DraftingChoice:
        """Choose the fastest; whole trees until enough trees were observed."""
        worth, seconds = self._worth.table, self._forward_seconds.of(requests)
        known = self._worth.whole_trees >= FIRST_TREES
        if not known or worth is None or self._cost is None or seconds is None:
            return DraftingChoice(self._most, self.sizes[-1])
        # A choice looks no further: a kernel that is faster with more rows has up to twice as many.
        most = 2 * requests * (1 + self.sizes[-1])
        curve = self._cost.seconds(most, self._context, optimism(self._lookups))
        given = (requests, curve, seconds)
        best = best_drafting(worth, *given, self.sizes, range(self._fewest, 1 + self._most))
        if self._lookups % FURTHER_EVERY:
            return best
        further = min(self._most, 2 * best.forwards + 2)
        some = 1 if self.sizes[0] == 0 else 0
        return best_drafting(
            worth[:, some:], *given, self.sizes[some:], range(further, further + 1)
        )

    def measured(self, cost: RowCost, fewest_forwards: int = 0) -> None:
        """Use the costs that were measured at start-up, and the fewest forwards of a step."""
        self._cost, self._fewest = cost, fewest_forwards

    def observe(self, counts: WorkerCounts, rows: int) -> StepSeconds | None:
        """Learn from the output of a step of ``rows``.

        Return its seconds; None if nothing was expected of it.
        """
        now, before = time.perf_counter(), self._came
        if counts.replaced:  # The worth of trees is another with other weights.
            self._worth = TreeWorth(self._most)
        for of_step in counts.drafted:
            self._forward_seconds.observe(*of_step)
        # After a step with prompts, the time to the next output is not that of decoding.
        decoding = all(counts.decoding)
        self._came = now if decoding else None
        if not decoding:
            return None
        self._context = counts.context
        if counts.worth and counts.verified and counts.growth_forwards is not None:
            known = len(counts.worth) if counts.ended_early else counts.growth_forwards + 1
            seen = np.asarray(counts.worth)[:known]
            self._worth.observe(seen, len(counts.decoding))
        forward = self._forward_seconds.of(len(counts.decoding))
        if self._cost is None or before is None or forward is None:
            return None
        # Asynchronously, the trees of a step are drafted after the output of the one before.
        forwards = 1 + (counts.growth_forwards or 0)
        if self._synchronous:
            forwards = counts.draft_forwards
        spent = max(now - before - forward * forwards, 1e-6)
        expected = self._cost.observe(rows, spent, self._context) + forward * forwards
        return StepSeconds(expected, now - before)
