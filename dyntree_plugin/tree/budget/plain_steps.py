"""Estimate the time of decoding without trees: measured at start-up, corrected while serving."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyntree_plugin.tree.budget.row_cost import MEMORY

HELD = (0.01, 5.0)
"""Weight, in observations, that draws level and tilt to 0. If all steps have one number of rows,
they show the level only: the machine is more or less busy than when it was measured."""
FIRST_STEPS = 20
"""Steps to observe before any estimate is given."""
UNSURE = 0.15
"""No estimate is given above this mean error of recent steps, a logarithm of forwards' times."""
LARGEST_SURPRISE = 1.0
"""Bound of one observation, a logarithm of a forward's time: one interrupted step must not move the
estimate far."""

_KEPT = math.exp(-1 / MEMORY)


@dataclass(frozen=True)
class StepCosts:
    """The measured seconds of the target's plain steps, and of its steps by their rows.

    ``requests`` are ascending batch sizes. ``without_context`` are the seconds of forward and
    sampler with one row per request and no context, and ``with_context`` those with ``context``
    tokens for each request. ``rows`` ascend from 1. Over these rows without context, ``forwards``
    are the seconds of the forward, and ``with_head`` those with the output head. A step has at most
    ``most_rows``. ``of_position``: the seconds that a position of context adds to each row of a
    tree, without those of reading it. Values between the points are interpolated linearly.
    """

    requests: tuple[int, ...]
    context: int
    without_context: tuple[float, ...]
    with_context: tuple[float, ...]
    rows: tuple[int, ...]
    forwards: tuple[float, ...]
    with_head: tuple[float, ...]
    most_rows: int
    of_position: float = 0.0

    def seconds(self, requests: int, context: float) -> float:
        """Return the seconds of a step of ``requests`` with ``context`` tokens each."""
        without, _ = self._of_batches[min(requests, self.requests[-1])]
        return without + self.reading(requests, context)

    def reading(self, requests: int, context: float) -> float:
        """Return the seconds that ``context`` tokens of each request add to a forward."""
        without, full = self._of_batches[min(requests, self.requests[-1])]
        return max(full - without, 0.0) * context / self.context

    @cached_property
    def _of_batches(self) -> list[tuple[float, float]]:
        """``without_context`` and ``with_context`` of 0, 1, … requests."""
        every = np.arange(self.requests[-1] + 1)
        measured = self.without_context, self.with_context
        both = [np.interp(every, self.requests, seconds) for seconds in measured]
        return [(float(without), float(full)) for without, full in zip(*both, strict=True)]


class LevelAndTilt:
    """Fits the logarithm of observed over measured seconds, by rows, with a level and a tilt.

    It uses recursive least squares with forgetting. ``prior`` is the weight, in observations, that
    draws level and tilt to 0, and ``measured`` is that weight at the start.
    """

    def __init__(self, measured: tuple[float, float], prior: tuple[float, float]) -> None:
        self._prior = prior
        # The normal equations' matrix, symmetric, and their right side.
        self._of_level, self._of_tilt = measured
        self._of_both = 0.0
        self._right = (0.0, 0.0)
        self._level = self._tilt = 0.0

    def moved(self, rows: int) -> float:
        """Return the logarithm at ``rows``."""
        return self._level + self._tilt * math.log(max(rows, 1))

    def observe(self, rows: int, moved: float) -> None:
        """Learn from an observation ``moved`` at ``rows``."""
        at = math.log(max(rows, 1))
        self._of_level = _KEPT * self._of_level + (1 - _KEPT) * self._prior[0] + 1
        self._of_tilt = _KEPT * self._of_tilt + (1 - _KEPT) * self._prior[1] + at * at
        self._of_both = _KEPT * self._of_both + at
        level, tilt = self._right
        self._right = level, tilt = _KEPT * level + moved, _KEPT * tilt + at * moved
        determinant = self._of_level * self._of_tilt - self._of_both**2
        self._level = (self._of_tilt * level - self._of_both * tilt) / determinant
        self._tilt = (self._of_level * tilt - self._of_both * level) / determinant


class PlainSteps:
    """Estimates the seconds of the plain steps that steps with trees replace.

    The forwards of all steps correct the measurement by their rows, since the machine's speed may
    change. A plain step costs at most the target's part of the step that it is compared with,
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
        """Return the seconds of a plain step of decoding ``requests`` with ``context`` tokens each.

        Call it once for each step: it learns from the step with trees of these requests, which had
        ``rows`` and took ``forward`` and ``sampling`` seconds on the target. Returns None while the
        estimate is too uncertain.
        """
        if forward <= 0 or rows > self._most:
            return None
        expected = float(self._forward[rows]) + self._measured.reading(requests, context)
        self._observe(rows, math.log(forward / expected))
        if self._steps < FIRST_STEPS or abs(self._surprise) > UNSURE:
            return None
        measured = forward + sampling
        if rows <= requests:
            return measured
        moved = math.exp(self._level_and_tilt.moved(requests))
        return min(self._measured.seconds(requests, context) * moved, measured)

    def _observe(self, rows: int, moved: float) -> None:
        """Learn from a forward; ``moved`` is the log of its time over the measured one."""
        expected = self._level_and_tilt.moved(rows)
        surprise = min(max(moved - expected, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self._level_and_tilt.observe(rows, expected + surprise)
        self._surprise += (surprise - self._surprise) / MEMORY
        self._steps += 1
