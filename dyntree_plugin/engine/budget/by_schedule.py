"""The adaptive budget where the host sees no tree in time: one choice for all trees of a step."""

from __future__ import annotations

import time

import numpy as np

from dyntree_plugin.engine.configuration import node_buckets
from dyntree_plugin.engine.telemetry.stats import WorkerCounts
from dyntree_plugin.tree.budget.choice import Drafting, best_drafting
from dyntree_plugin.tree.budget.row_cost import RowCost
from dyntree_plugin.tree.budget.worth import FIRST_TREES, ForwardSeconds, TreeWorth

FORWARDS = "dyntree_forwards"
"""Where a SchedulerOutput carries the most draft forwards that may follow the catch-up's."""

TRIED_EVERY = 64
"""Steps after which trees are drafted about twice as far as it seems best, and at least two
forwards, to learn what that would be worth. It costs less than 1 step in so many."""


class NodeBuckets:
    """What vLLM's scheduler looks up when it schedules asynchronously: nodes by requests.

    It stands in for the table of vLLM's own batch-size schedule (`dynamic_sd_lookup`), and chooses
    the number of draft ``forwards`` with them. It learns from outputs, which come a step or two
    late: what trees were worth, what draft forwards took, and the time from output to output, in
    which everything is that a step takes.
    """

    def __init__(self, sizes: tuple[int, ...], forwards: int) -> None:
        """``sizes``: those to choose from, ascending. ``forwards``: the most behind the
        catch-up's."""
        self.sizes = sizes
        self.forwards = forwards
        """Of the last choice."""
        self._most = forwards
        # Columns of the worker's table.
        self._offered = [node_buckets(sizes[-1]).index(size) for size in sizes]
        self._fewest = 0
        self._cost: RowCost | None = None
        self._worth = TreeWorth(forwards)
        self._forward_seconds = ForwardSeconds()
        self._lookups = 0
        self._came: float | None = None

    def __getitem__(self, requests: int) -> int:
        """Nodes of each request in a step of so many."""
        self._lookups += 1
        chosen = self._choose(requests)
        self.forwards = chosen.forwards
        return chosen.nodes

    def _choose(self, requests: int) -> Drafting:
        """The most until enough is known."""
        worth, seconds = self._worth.table, self._forward_seconds.of(requests)
        known = self._worth.whole_trees >= FIRST_TREES
        if not known or worth is None or self._cost is None or seconds is None:
            return Drafting(self._most, self.sizes[-1])
        given = (requests, self._cost.seconds(), seconds)
        best = best_drafting(worth, *given, self.sizes, range(self._fewest, 1 + self._most))
        if self._lookups % TRIED_EVERY:
            return best
        further = min(self._most, 2 * best.forwards + 2)
        some = 1 if self.sizes[0] == 0 else 0
        return best_drafting(worth[:, some:], *given, self.sizes[some:], [further])

    def measured(self, cost: RowCost, fewest_forwards: int = 0) -> None:
        """Take what rows cost before the engine served, and the fewest forwards that it can
        make."""
        self._cost, self._fewest = cost, fewest_forwards

    def observe(self, counts: WorkerCounts, rows: int) -> None:
        """Learn from the output of a step of so many ``rows``."""
        now, before = time.perf_counter(), self._came
        for of_step in counts.drafted:
            self._forward_seconds.observe(*of_step)
        # Nothing comes behind a step that reads a prompt at the pace of decoding.
        decoding = all(counts.decoding)
        self._came = now if decoding else None
        if not decoding:
            return
        if counts.worth and counts.nodes and counts.grown_by is not None:
            seen = np.asarray(counts.worth)[: counts.grown_by + 1, self._offered]
            self._worth.observe(seen, len(counts.decoding))
        forward = self._forward_seconds.of(len(counts.decoding))
        if self._cost is not None and before is not None and forward is not None:
            # The trees of a step are drafted behind the output of the one before.
            drafting = forward * (1 + (counts.grown_by or 0))
            self._cost.observe(rows, max(now - before - drafting, 1e-6))
