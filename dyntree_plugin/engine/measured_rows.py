"""What verifying so many rows costs, measured before the engine serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from unittest import mock

from dyntree_plugin.tree.row_cost import RowCost

if TYPE_CHECKING:
    from dyntree_plugin.engine.runner import TreeRunnerMixin

LONGEST_SECONDS = 8.0
"""What the measurement may take, about. Slow models are measured at fewer numbers of rows."""
PASSES = 5


def measure_rows(runner: TreeRunnerMixin) -> RowCost:
    """Time the target's forward and head over 1, 2, 3, … rows, as many as a step can verify.

    Call it when the KV cache is there and no request has come yet: the steps write into it.
    """
    most = min(runner.max_num_reqs * (runner.trees.shape.node_budget + 1), runner.max_num_tokens)
    rows, passes, allowed = row_numbers(most), PASSES, LONGEST_SECONDS / 2
    with mock.patch.object(runner, "speculator", None):
        _seconds(runner, most)
        if runner.parallel_config.world_size_across_dp > 1:
            # Ranks run every step together, and their clocks would not end it at the same one.
            rows, passes, allowed = rows[::4], 2, float("inf")
        else:
            # Rows in the middle are taken to cost half of the most.
            pass_seconds = len(rows) * _seconds(runner, most) / 2
            rows = rows[:: max(1, round(pass_seconds / allowed))]
        best = dict.fromkeys(rows, float("inf"))
        began = time.perf_counter()
        # The first pass makes what kernels keep by their number of rows; the least of all passes
        # is what no other program has disturbed.
        for number in range(passes):
            for each in rows:
                best[each] = min(best[each], _seconds(runner, each))
            if number and time.perf_counter() - began > allowed:
                break
    return RowCost(tuple(rows), tuple(best[each] for each in rows), most)


def row_numbers(most: int) -> list[int]:
    """Each number up to 16, and from there on every eighth of a power of two, up to ``most``."""
    rows, at = [], 1
    while at <= most:
        rows.append(at)
        at += max(1, 1 << max(0, at.bit_length() - 4))
    return rows


def _seconds(runner: TreeRunnerMixin, rows: int) -> float:
    model: Any = runner.model
    runner.clock.split()
    runner.get_ahead()
    hidden, _ = runner._dummy_run(rows)
    if hidden is None:
        raise RuntimeError("this worker does not hold the last layer of the model")
    with runner.clock("sample"):
        model.compute_logits(hidden[:rows])
    return sum(runner.clock.split().seconds().values())
