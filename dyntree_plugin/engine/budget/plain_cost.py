"""What a step without speculation costs, measured before the engine serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dyntree_plugin.engine.budget.timed_steps import Agree, most_rows, seconds_of, without_drafting
from dyntree_plugin.tree.budget.plain_steps import PlainCost

if TYPE_CHECKING:
    from dyntree_plugin.engine.runner import TreeRunnerMixin

CONTEXT = 1024
"""Tokens that every request of the longer steps has behind it, or as many as the model allows."""
REPETITIONS = 5
SIZES = 8
"""The most numbers of requests that are measured."""
SECONDS = 10.0
"""Time after which every step that is left is measured once."""
FORWARD_SECONDS = 8.0
"""What the forwards over the rows of trees may take; slow models run them over fewer rows."""


def measure(runner: TreeRunnerMixin, agree: Agree) -> PlainCost:
    """Time plain decode steps of 1, 2, 4, … up to as many requests as the engine takes at once, or
    of 1, 4, 16, … where these are many; and forwards over as many rows as trees can have.

    Call it when the KV cache is there and no request has come yet: the steps write into it.
    """
    most = min(runner.max_num_reqs, runner.max_num_tokens)
    sizes = sizes_up_to(most)
    # Ranks run every step together, and their clocks would not end it at the same one.
    together = runner.parallel_config.world_size_across_dp > 1
    deadline = 0.0 if together else time.monotonic() + SECONDS
    context = max(1, min(CONTEXT, runner.max_model_len - 1))
    with without_drafting(runner):
        runner.sample_greedily(most)
        _step(runner, most, context)
        alone, behind = (
            tuple(_least(runner, size, length, deadline) for size in sizes)
            for length in (0, context)
        )
        forwards = _forwards(runner, agree)
    return PlainCost(
        tuple(sizes), context, alone, behind, tuple(forwards), tuple(forwards.values())
    )


def _forwards(runner: TreeRunnerMixin, agree: Agree) -> dict[int, float]:
    """Seconds of the target's forward by its rows, which ascend."""
    most = most_rows(runner)
    deadline = time.monotonic() + FORWARD_SECONDS
    best: dict[int, float] = {}
    rows, seconds = 1, 0.0
    for size in sizes_up_to(most):
        # More rows take as many times longer at most, and the first forward over them makes what
        # kernels keep by their number.
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


def sizes_up_to(most: int) -> list[int]:
    factor, sizes = 1, list[int]()
    while not sizes or len(sizes) > SIZES:
        factor *= 2
        sizes = [1]
        while sizes[-1] < most:
            sizes.append(min(sizes[-1] * factor, most))
    return sizes


def _least(runner: TreeRunnerMixin, requests: int, context: int, deadline: float) -> float:
    """Seconds of a step that no other program has disturbed, as those of `_forwards`."""
    times: list[float] = []
    while not times or (len(times) < REPETITIONS and time.monotonic() < deadline):
        times.append(_step(runner, requests, context))
    return min(times)


def _step(runner: TreeRunnerMixin, requests: int, context: int) -> float:
    return seconds_of(
        runner, lambda: runner._dummy_run(requests, context_len=context)[1], runner.sample_plain
    )


def _forward(runner: TreeRunnerMixin, rows: int) -> float:
    return seconds_of(runner, lambda: runner._dummy_run(rows)[0], lambda _: None)
