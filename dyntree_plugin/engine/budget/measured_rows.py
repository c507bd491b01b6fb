"""The cost of verification by its number of rows, measured at start-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from dyntree_plugin.engine.budget.timed_steps import (
    Agree,
    TimedRunner,
    most_rows,
    over_few_rows,
    seconds_of,
    without_drafting,
)
from dyntree_plugin.tree.budget.row_cost import RowCost

LONGEST_SECONDS = 4.0
"""About the longest time of the measurement. Slow models are measured at fewer sizes, of which the
rows of one tree and of four are always two."""
PASSES = 5
SLOW_STEP = LONGEST_SECONDS / 16
"""Seconds of a step from which each number of rows is run once, where it tells most."""
RISE = 1.05
"""Ratio of two times, from which it matters where between their rows steps become longer."""
BEND = 1.1
"""The same ratio of slow steps."""


def measure_rows(runner: TimedRunner, agree: Agree) -> RowCost:
    """Time the target's forward and head over 1, 2, 3, … rows, up to the most of a step.

    Call it after the KV cache is allocated and before the first request: the steps write into it.
    """
    with without_drafting(runner):
        one = agree(_seconds(runner, 1))
        if one > SLOW_STEP:
            best = _where_they_bend(runner, agree, one)
        else:
            best = _over_many_rows(runner, agree)
    measured = sorted(best)
    return RowCost(tuple(measured), tuple(best[rows] for rows in measured), most_rows(runner))


def _where_they_bend(runner: TimedRunner, agree: Agree, one: float) -> dict[int, float]:
    """Return seconds by rows, of slow steps: few where the seconds hardly rise.

    A step over offloaded weights takes their transfer or its arithmetic, whichever is longer. So
    the seconds are level up to some number of rows, which lies where they rise most.
    """

    def seconds(rows: int) -> float:
        return agree(_seconds(runner, rows))

    began = time.perf_counter()
    best = over_few_rows(runner, agree, one, seconds)

    def measure(rows: int) -> None:
        best[rows] = seconds(rows)

    _refine(best, measure, BEND, lambda: agree(LONGEST_SECONDS - (time.perf_counter() - began)))
    return best


def _over_many_rows(runner: TimedRunner, agree: Agree) -> dict[int, float]:
    """Return seconds by rows, of as many steps as there is time for.

    Powers of two come first, then numbers between the neighbours that differ most. Kernels take
    rows by the block, so one row behind a block can cost as much as all of the next one: in
    bfloat16 on a CPU with AMX, a step of 1B took 83.8 ms over 1 row, 87.1 over 16 and 93.9 over 17.
    """
    most = most_rows(runner)
    best: dict[int, float] = {}
    began = time.perf_counter()

    def left(share: float = 1.0) -> float:
        return agree(share * LONGEST_SECONDS - (time.perf_counter() - began))

    def measure(rows: int) -> None:
        """Keep the shortest time, which other programs disturbed least."""
        best[rows] = min(best.get(rows, float("inf")), agree(_seconds(runner, rows)))

    def measure_first(rows: int) -> None:
        measure(rows)  # kernels allocate by their number of rows
        measure(rows)

    for rows in (1 << power for power in range(most.bit_length())):
        # Twice the rows take twice the time at most, and are run twice.
        if best and agree(4 * best[rows // 2]) > left(0.5):
            break
        measure_first(rows)
    # The slope must be known, however slow the target is: rows of one tree, and of four.
    tree = 1 + runner.trees.shape.node_budget
    for rows in sorted({min(most, tree), min(most, 4 * tree)}):
        if rows > max(best):
            measure(rows)
    _refine(best, measure_first, RISE, left)
    for _ in range(PASSES - 1):
        for rows in sorted(best):
            if left() < 0:
                break
            measure(rows)
    return best


def _refine(
    best: dict[int, float],
    measure: Callable[[int], None],
    ratio: float,
    seconds_left: Callable[[], float],
) -> None:
    """Measure between the neighbours of ``best`` that differ most, until none differs by ``ratio``.

    It ends if a step might not end within ``seconds_left``.
    """
    while True:
        spans = [(low, high) for low, high in pairwise(sorted(best)) if high > low + 1]
        low, high = max(spans, key=lambda span: best[span[1]] / best[span[0]], default=(1, 1))
        # A step between the two takes as long as the longer one at most.
        if best[high] < ratio * best[low] or seconds_left() < best[high]:
            return
        measure((low + high) // 2)


def _seconds(runner: TimedRunner, rows: int) -> float:
    model: Any = runner.model
    return seconds_of(
        runner,
        lambda: runner._dummy_run(rows)[0],
        lambda hidden: model.compute_logits(hidden[:rows]),
    )
