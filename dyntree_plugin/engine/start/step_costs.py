"""Measure at start-up what steps of the target cost: plain steps, and steps by their rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from dyntree_plugin.engine.start.timed_steps import (
    Seconds,
    TimedRunner,
    most_rows,
    sample_greedily,
    sample_plain,
    seconds_of,
    without_drafting,
)
from dyntree_plugin.tree.budget.plain_steps import StepCosts

Agree = Callable[[Any], Any]
"""Returns the first rank's numbers on every rank: all ranks must run the same steps."""

CONTEXT = 1024
"""Context of a request in plain steps with context; less if the model allows less."""
REPETITIONS = 5
SIZES = 8
"""Most batch sizes, and most first numbers of rows, that are measured."""
PLAIN_SECONDS = 10.0
"""Limit for plain steps. One request and the most requests are always measured."""
ROW_SECONDS = 4.0
"""Limit for the first numbers of rows, and again for others between them. One row and the rows of
one tree are always measured."""
SLOW_STEP = 0.25
"""If a step over one row takes more seconds, measure each number of rows once: noise is small."""
RISE, SLOW_RISE = 1.05, 1.1
"""Measure between two numbers of rows if the ratio of their seconds is at least this; the second is
for slow steps."""

CHANGED = 2.0
"""Measure anew if a step takes more or less than kept costs say by this factor. Below it, serving
corrects them."""
CHECK_SECONDS = 2.0
"""Limit for finding that kept costs still hold: other programs may disturb the first steps."""


class _Timed:
    """Keeps the shortest seconds of each step, which other programs disturbed least."""

    def __init__(self, run: Callable[[Any], Seconds], agree: Agree) -> None:
        self.best: dict[Any, Seconds] = {}
        self._run, self._agree, self._began = run, agree, time.perf_counter()

    def __call__(self, step: Any, times: int = 1) -> float:
        for _ in range(times):
            took = self._run(step)
            self.best[step] = min(self.best.get(step, took), took)
        return self.best[step].whole

    def left(self, seconds: float) -> float:
        """Return what is left of ``seconds`` since the start, the same on every rank."""
        return float(self._agree(self._began + seconds - time.perf_counter()))

    def repeat(self, seconds: float) -> None:
        """Run all steps again, until ``seconds`` are over."""
        for step in sorted(self.best) * (REPETITIONS - 1):
            if self.left(seconds) < 0:
                return
            self(step)


def measure(
    runner: TimedRunner, agree: Agree, closely: bool, by_context: bool = False
) -> StepCosts:
    """Time plain steps of 1, 2, 4, … requests, and forward and head over 1, 2, 4, … rows of trees.

    With many requests or rows the sizes are 1, 4, 16, …; slow steps are measured at fewer. If
    ``closely``, further rows are measured where the seconds rise. If ``by_context``, rows of a tree
    are measured with context, too. Call it after the KV cache is allocated and before the first
    request: the steps write into it.
    """
    most = min(runner.max_num_reqs, runner.max_num_tokens)
    context = max(1, min(CONTEXT, runner.max_model_len - 1))
    with without_drafting(runner):
        sample_greedily(runner, most)
        plain = _plain_steps(runner, agree, most, context)
        by_rows = _by_rows(runner, agree, closely)
        reading = (plain[1, context].whole - plain[1, 0].whole) / context
        of_position = _of_position(runner, agree, context, reading) if by_context else 0.0
    sizes, rows = sorted({size for size, _ in plain}), sorted(by_rows)
    return StepCosts(
        requests=tuple(sizes),
        context=context,
        without_context=tuple(plain[size, 0].whole for size in sizes),
        with_context=tuple(plain[size, context].whole for size in sizes),
        rows=tuple(rows),
        forwards=tuple(by_rows[each].forward for each in rows),
        with_head=tuple(by_rows[each].whole for each in rows),
        most_rows=most_rows(runner),
        of_position=of_position,
    )


def still_hold(runner: TimedRunner, agree: Agree, costs: StepCosts) -> bool:
    """Time a few steps again; return whether they take about as long as ``costs`` say.

    They are a plain step of one request, with context and without, and one over the rows of about
    one tree.
    """
    tree = max(rows for rows in costs.rows if rows <= 1 + runner.trees.shape.node_budget)
    before = {
        (1, 0): costs.without_context[0],
        (1, costs.context): costs.with_context[0],
        (tree,): costs.with_head[costs.rows.index(tree)],
    }

    def run(step: tuple[int, ...]) -> Seconds:
        return (
            _forward(runner, *step) if len(step) == 1 else _plain_step(runner, (step[0], step[1]))
        )

    timed = _Timed(run, agree)
    with without_drafting(runner):
        sample_greedily(runner, 1)
        while True:
            for step in before:
                timed(step)
            ratios = [timed.best[step].whole / seconds for step, seconds in before.items()]
            if agree(all(1 / CHANGED < ratio < CHANGED for ratio in ratios)):
                return True
            if timed.left(CHECK_SECONDS) < 0:
                return False


def _plain_steps(
    runner: TimedRunner, agree: Agree, most: int, context: int
) -> dict[tuple[int, int], Seconds]:
    """Return seconds by the number of requests and the context of each."""
    timed = _Timed(partial(_plain_step, runner), agree)
    for size in sorted(sizes_up_to(most), key=lambda size: 1 < size < most):
        if 1 < size < most and timed.left(PLAIN_SECONDS) < 0:
            break
        timed((size, 0))
        timed((size, context))
    timed.repeat(PLAIN_SECONDS)
    return timed.best


def _by_rows(runner: TimedRunner, agree: Agree, closely: bool) -> dict[int, Seconds]:
    """Return seconds by the number of rows, up to the most of a step if that is not too slow."""
    timed = _Timed(lambda rows: agree(_forward(runner, rows)), agree)
    most = most_rows(runner)
    one = timed(1)
    slow = one > SLOW_STEP
    times = 1 if slow else 2  # Kernels allocate by their number of rows.
    reached, seconds = 1, one if slow else timed(1)
    for rows in sizes_up_to(most)[1:]:
        # Time grows at most in proportion to the rows.
        if times * seconds * rows / reached > timed.left(ROW_SECONDS):
            break
        reached, seconds = rows, timed(rows, times)
    tree = min(most, 1 + runner.trees.shape.node_budget)
    if reached < tree:
        reached, seconds = tree, timed(tree)
    per_row = max(seconds - one, 0.0) / max(reached - 1, 1)
    for rows in (most, min(most, 4 * tree)):
        expected = seconds + per_row * (rows - reached)
        if rows > reached and expected <= max(2 * one, ROW_SECONDS):
            timed(rows)
            break
    end = 2 * ROW_SECONDS - max(timed.left(ROW_SECONDS), 0.0)
    if not slow:  # Where a step was disturbed, seconds would rise, and be refined for nothing.
        timed.repeat(ROW_SECONDS)
    if closely:
        _refine(timed, times, SLOW_RISE if slow else RISE, end)
    if not slow:
        timed.repeat(end)
    return timed.best


def _of_position(runner: TimedRunner, agree: Agree, context: int, reading: float) -> float:
    """Return the seconds that a position of ``context`` adds to each row of a tree but the first.

    ``reading``: those that it adds to a step of one row, which are mostly the time to read it.
    """
    rows = runner.decode_query_len
    context = min(context, runner.max_model_len - rows)
    if rows < 2 or context < 1:
        return 0.0

    timed = _Timed(
        lambda length: agree(_forward(runner, rows, uniform_decode=True, context_len=length)), agree
    )
    more = timed(context, REPETITIONS) - timed(0, REPETITIONS)
    return max(more / context - reading, 0.0) / (rows - 1)


def _refine(timed: _Timed, times: int, rise: float, end: float) -> None:
    """Measure between the neighbours that differ most, until none differs by ``rise``.

    Kernels take rows by the block, so one row more than a block can cost as much as a whole one: in
    bfloat16 on a CPU with AMX, a step of 1B took 83.8 ms over 1 row, 87.1 over 16 and 93.9 over 17.
    With offloaded weights, seconds are constant as long as the transfer takes longer than the
    arithmetic. Stops if the next step might not finish by ``end``.
    """

    def ratio(span: tuple[int, int]) -> float:
        return timed.best[span[1]].whole / timed.best[span[0]].whole

    while True:
        spans = [span for span in pairwise(sorted(timed.best)) if span[1] > span[0] + 1]
        widest = max(spans, key=ratio, default=(1, 1))
        # A step between the two takes as long as the longer one at most.
        if ratio(widest) < rise or timed.left(end) < timed.best[widest[1]].whole:
            return
        timed(sum(widest) // 2, times)


def sizes_up_to(most: int) -> list[int]:
    factor, sizes = 1, list[int]()
    while not sizes or len(sizes) > SIZES:
        factor *= 2
        sizes = [1]
        while sizes[-1] < most:
            sizes.append(min(sizes[-1] * factor, most))
    return sizes


def _plain_step(runner: TimedRunner, step: tuple[int, int]) -> Seconds:
    requests, length = step
    return seconds_of(
        runner,
        lambda: runner._dummy_run(requests, context_len=length)[1],
        lambda hidden: sample_plain(runner, hidden),
    )


def _forward(runner: TimedRunner, rows: int, **how: Any) -> Seconds:
    return seconds_of(
        runner,
        lambda: runner._dummy_run(rows, **how)[0],
        lambda hidden: runner.model.compute_logits(hidden[:rows]),
    )
