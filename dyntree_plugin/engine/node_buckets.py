"""The adaptive node budget where the host sees no tree in time: one size for all, from averages."""

from __future__ import annotations

import time

import numpy as np

from dyntree_plugin.tree.budget import best_size
from dyntree_plugin.tree.row_cost import RowCost

STEP = 0.1
"""Weight of a step in the averages of the trees' values."""


class NodeBuckets:
    """What vLLM's scheduler looks up when it schedules asynchronously: nodes by requests.

    It stands in for the table of vLLM's own batch-size schedule (`dynamic_sd_lookup`), and learns
    from outputs, which come a step or two late: trees' mean values by rank, and the time from
    output to output, in which everything is that a step takes.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        """``sizes``: those to choose from, ascending."""
        self.sizes = sizes
        self._cost: RowCost | None = None
        self._ranked: np.ndarray | None = None
        self._came: float | None = None

    def __getitem__(self, requests: int) -> int:
        """Nodes of each request in a step of so many; the most until averages are known."""
        if self._cost is None or self._ranked is None:
            return self.sizes[-1]
        return best_size(self._ranked, requests, self._cost.seconds(), self.sizes)

    def measured(self, cost: RowCost) -> None:
        """Take what rows cost before the engine served."""
        self._cost = cost

    def observe(self, ranked: list[float], rows: int, decoding: bool) -> None:
        """Learn from an output: ``ranked`` as in `WorkerCounts`, the ``rows`` of its step, and
        whether all of its requests were ``decoding``."""
        now, before = time.perf_counter(), self._came
        # Nothing comes behind a step that reads a prompt at the pace of decoding.
        self._came = now if decoding else None
        if not decoding:
            return
        if ranked:
            latest = np.asarray(ranked)
            old = latest if self._ranked is None else self._ranked
            self._ranked = old + STEP * (latest - old)
        if self._cost is not None and before is not None:
            self._cost.observe(rows, now - before)
