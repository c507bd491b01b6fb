"""The cost of a step without speculation, measured at start-up."""

from __future__ import annotations

import time

from dyntree_plugin.engine.budget.timed_steps import (
    SLOW_STEP,
    Agree,
    TimedRunner,
    most_rows,
    over_few_rows,
    sample_greedily,
    sample_plain,
    seconds_of,
    without_drafting,
)
from dyntree_plugin.tree.budget.plain_steps import PlainCost

CONTEXT = 1024
"""Context of every request in the longer steps, or the longest that the model allows."""
REPETITIONS = 5
SIZES = 8
"""At most so many batch sizes are measured."""
SECONDS = 10.0
"""After this time, each remaining step is measured once."""
FORWARD_SECONDS = 8.0
"""Limit for the forwards over the rows of trees; slow models run them over fewer rows."""


def measure(runner: TimedRunner, agree: Agree) -> PlainCost:
    """Time plain decode steps of 1, 2, 4, … requests, and forwards over the rows of trees.

    If the engine takes many requests at once, the batch sizes are 1, 4, 16, …; if steps are slow,
    they are 1 and the most. Call it after the KV cache is allocated and before the first request:
    the steps write into it.
    """
    most = min(runner.max_num_reqs, runner.max_num_tokens)
    # Ranks run every step together, and their clocks would not end it at the same one.
    together = runner.parallel_config.world_size_across_dp > 1
    deadline = 0.0 if together else time.monotonic() + SECONDS
    context = max(1, min(CONTEXT, runner.max_model_len - 1))
    with without_drafting(runner):
        sample_greedily(runner, most)
        slow = agree(_step(runner, most, context)) > SLOW_STEP
        sizes = sorted({1, most}) if slow else sizes_up_to(most)
        if slow:
            deadline = 0.0
        alone, behind = (
            tuple(_least(runner, size, length, deadline) for size in sizes)
            for length in (0, context)
        )
        forwards = _slow_forwards(runner, agree) if slow else _forwards(runner, agree)
    return PlainCost(
        tuple(sizes), context, alone, behind, tuple(forwards), tuple(forwards.values())
    )


def _forwards(runner: TimedRunner, agree: Agree) -> dict[int, float]:
    """Return seconds of the target's forward by its number of rows, ascending."""
    most = most_rows(runner)
    deadline = time.monotonic() + FORWARD_SECONDS
    best: dict[int, float] = {}
    rows, seconds = 1, 0.0
    for size in sizes_up_to(most):
        # Time grows at most in proportion to the rows. The first forward over a number of rows
        # also allocates what kernels keep for it.
        if agree(deadline - time.monotonic() - 2 * seconds * size / rows) < 0:
            break
        _forward(runner, size)
        rows, seconds = size, _forward(runner, size)
        best[size] = seconds
    for _ in range(REPETITIONS - 1):
        if agree(deadline - time.monotonic() - sum(best.values())) < 0:
            break
        for size in best:
            best[size] = min(best[size], _forward(runner, size))
    return best


def _slow_forwards(runner: TimedRunner, agree: Agree) -> dict[int, float]:
    one = _forward(runner, 1)
    return over_few_rows(runner, agree, one, lambda rows: _forward(runner, rows))


def sizes_up_to(most: int) -> list[int]:
    factor, sizes = 1, list[int]()
    while not sizes or len(sizes) > SIZES:
        factor *= 2
        sizes = [1]
        while sizes[-1] < most:
            sizes.append(min(sizes[-1] * factor, most))
    return sizes


def _least(runner: TimedRunner, requests: int, context: int, deadline: float) -> float:
    """Return the shortest time of a step, which other programs disturbed least."""
    times: list[float] = []
    while not times or (len(times) < REPETITIONS and time.monotonic() < deadline):
        times.append(_step(runner, requests, context))
    return min(times)


def _step(runner: TimedRunner, requests: int, context: int) -> float:
    return seconds_of(
        runner,
        lambda: runner._dummy_run(requests, context_len=context)[1],
        lambda hidden: sample_plain(runner, hidden),
    )


def _forward(runner: TimedRunner, rows: int) -> float:
    return seconds_of(runner, lambda: runner._dummy_run(rows)[0], lambda _: None)
