"""What verifying so many rows costs, measured before the engine serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dyntree_plugin.engine.budget.timed_steps import Agree, most_rows, seconds_of, without_drafting
from dyntree_plugin.tree.budget.row_cost import RowCost

if TYPE_CHECKING:
    from dyntree_plugin.engine.runner import TreeRunnerMixin

LONGEST_SECONDS = 4.0
"""What the measurement may take, about. Slow models are measured at fewer numbers of rows."""
PASSES = 5


def measure_rows(runner: TreeRunnerMixin, agree: Agree) -> RowCost:
    """Time the target's forward and head over 1, 2, 3, … rows, as many as a step can verify.

    Call it when the KV cache is there and no request has come yet: the steps write into it.
    """
    most = most_rows(runner)
    best: dict[int, float] = {}
    began = time.perf_counter()

    def left(share: float = 1.0) -> float:
        return agree(share * LONGEST_SECONDS - (time.perf_counter() - began))

    def measure(rows: int) -> None:
        """Keep the least, which is what no other program has disturbed."""
        best[rows] = min(best.get(rows, float("inf")), _seconds(runner, rows))

    def measure_first(rows: int) -> None:
        _seconds(runner, rows)  # makes what kernels keep by their number of rows
        measure(rows)

    numbers = row_numbers(most)
    powers = [rows for rows in numbers if rows.bit_count() == 1]
    with without_drafting(runner):
        for rows in powers:
            # Twice the rows take twice the time at most, and are run twice.
            if best and agree(4 * best[rows // 2]) > left(0.5):
                break
            measure_first(rows)
        for rows in numbers:
            if rows > max(best) or left() < 0:
                break
            if rows not in best:
                measure_first(rows)
        for _ in range(PASSES - 1):
            for rows in sorted(best):
                if left() < 0:
                    break
                measure(rows)
    measured = sorted(best)
    return RowCost(tuple(measured), tuple(best[rows] for rows in measured), most)


def row_numbers(most: int) -> list[int]:
    """Each number up to 16, and from there on every eighth of a power of two, up to ``most``."""
    rows, at = [], 1
    while at <= most:
        rows.append(at)
        at += max(1, 1 << max(0, at.bit_length() - 4))
    return rows


def _seconds(runner: TreeRunnerMixin, rows: int) -> float:
    model: Any = runner.model
    return seconds_of(
        runner,
        lambda: runner._dummy_run(rows)[0],
        lambda hidden: model.compute_logits(hidden[:rows]),
    )
