"""The time of decoding without trees, which is measured first and followed while serving."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyntree_plugin.tree.budget.row_cost import MEMORY, LevelAndTilt

HELD = (0.01, 5.0)
"""The weight, in observations, with which level and tilt are held at 0. If all steps have one
number of rows, they tell the level alone: the machine is more or less busy than when it was
measured."""
FIRST_STEPS = 20
"""Steps to observe before any estimate is given."""
UNSURE = 0.15
"""The largest mean error, as a logarithm of forwards' times, with which an estimate is given. The
mean is over recent steps, so that noise counts for little."""
LARGEST_SURPRISE = 1.0
"""The bound of one observation, as a logarithm of a forward's time: one interrupted step must not
move the estimate far."""


@dataclass(frozen=True)
class StepCosts:
    """The measured seconds of the target's plain steps, and of its steps by their rows.

    ``requests`` are ascending batch sizes. ``alone`` are the seconds of forward and sampler with
    one row per request and no context, and ``behind`` those with ``context`` tokens for each
    request. ``rows`` ascend from 1; ``forwards`` and ``with_head`` are the seconds of the forward
    over so many rows without context, alone and with the output head. A step has at most
    ``most_rows``. Values between the points lie on the lines through them.
    """

    requests: tuple[int, ...]
    context: int
    alone: tuple[float, ...]
    behind: tuple[float, ...]
    rows: tuple[int, ...]
    forwards: tuple[float, ...]
    with_head: tuple[float, ...]
    most_rows: int

    def seconds(self, requests: int, context: float) -> float:
        """Return the seconds of a step of so many requests with ``context`` tokens each."""
        alone, _ = self._of_batches[min(requests, self.requests[-1])]
        return alone + self.reading(requests, context)

    def reading(self, requests: int, context: float) -> float:
        """Return the seconds that a forward takes longer if each request has ``context`` tokens."""
        alone, behind = self._of_batches[min(requests, self.requests[-1])]
        return max(behind - alone, 0.0) * context / self.context

    @cached_property
    def _of_batches(self) -> list[tuple[float, float]]:
        """``alone`` and ``behind`` of 0, 1, … requests."""
        every = np.arange(self.requests[-1] + 1)
        both = [np.interp(every, self.requests, known) for known in (self.alone, self.behind)]
        return [(float(alone), float(behind)) for alone, behind in zip(*both, strict=True)]


class PlainSteps:
    """The seconds of the steps without trees that steps with trees replace.

    The forwards of all steps correct the measurement by their rows, since the machine's speed may
    change. A plain step costs no more than the target's part of the step that it is compared with,
    which has at least as many rows. So the reported speed-up never exceeds the tokens per request
    and step, however wrong the measurement was.
    """

    def __init__(self, measured: StepCosts) -> None:
        self._measured = measured
        self._most = measured.rows[-1]
        self._forward = np.interp(np.arange(self._most + 1), measured.rows, measured.forwards)
        self._level_and_tilt = LevelAndTilt(HELD, HELD)
        self._steps = 0
        self._surprise = 0.0

    def seconds(
        self, requests: int, context: float, rows: int, forward: float, sampling: float
    ) -> float | None:
        """Return the seconds of a plain step of so many decoding requests with ``context`` tokens
        each, or None if they are not known well enough.

        It learns from the step with trees of these requests, which had ``rows`` and took
        ``forward`` and ``sampling`` seconds on the target. Call it once for each step.
        """
        if forward <= 0 or rows > self._most:
            return None
        expected = float(self._forward[rows]) + self._measured.reading(requests, context)
        self._observe(rows, math.log(forward / expected))
        if self._steps < FIRST_STEPS or abs(self._surprise) > UNSURE:
            return None
        own = forward + sampling
        if rows <= requests:
            return own
        moved = math.exp(self._level_and_tilt.moved(requests))
        return min(self._measured.seconds(requests, context) * moved, own)

    def _observe(self, rows: int, moved: float) -> None:
        """Learn from a forward; ``moved`` is the log of its time over the measured one."""
        known = self._level_and_tilt.moved(rows)
        surprise = min(max(moved - known, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self._level_and_tilt.observe(rows, known + surprise)
        self._surprise += (surprise - self._surprise) / MEMORY
        self._steps += 1
