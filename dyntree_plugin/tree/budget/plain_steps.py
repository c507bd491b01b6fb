"""What decoding without trees would take: measured first, followed while trees are served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dyntree_plugin.tree.budget.row_cost import MEMORY, LevelAndTilt, scale_of

HELD = (0.01, 5.0)
"""How firmly level and tilt are held at 0, in observations: what all steps of one number of rows
tell is the level, of a machine that is not as busy as it was when it was measured."""
FIRST_STEPS = 20
"""Steps that are observed before anything is said."""
UNSURE = 0.15
"""Of the logarithm of forwards' times: where they have lately been further from what was expected
on average, so that noise counts for little, nothing is said."""
LARGEST_SURPRISE = 1.0
"""Of the logarithm of a forward's time: one interrupted step must not move the estimate far."""


@dataclass(frozen=True)
class PlainCost:
    """Seconds of the target's forward and sampler with one row for each of so many requests, and of
    its forward over so many rows.

    ``requests``: ascending numbers. ``alone``: seconds where no request has anything behind it;
    ``behind``: where each has ``context`` tokens. ``rows``: ascending from 1; ``forwards``: seconds
    of the forward alone, with nothing behind it. The rest lies on the lines through them.
    """

    requests: tuple[int, ...]
    context: int
    alone: tuple[float, ...]
    behind: tuple[float, ...]
    rows: tuple[int, ...]
    forwards: tuple[float, ...]

    def seconds(self, requests: int, context: float) -> float:
        alone = np.interp(requests, self.requests, self.alone)
        return float(alone + self.reading(requests, context))

    def reading(self, requests: int, context: float) -> float:
        """Seconds that a forward takes longer with so many tokens behind each request."""
        alone = np.interp(requests, self.requests, self.alone)
        behind = np.interp(requests, self.requests, self.behind)
        return float(max(behind - alone, 0.0) * context / self.context)


class PlainSteps:
    """Seconds of the plain steps that steps with trees stand for.

    What was measured is corrected by the forwards of all steps, by their rows: the machine may be
    as fast as it was, or not. A plain step costs no more than the target's part of the step that it
    is compared with, which has as many rows at least; so however wrong the measurement was, trees
    are never said to speed decoding up by more than their tokens per request and step.
    """

    def __init__(self, measured: PlainCost) -> None:
        self._measured = measured
        self._most = measured.rows[-1]
        self._forward = np.interp(np.arange(self._most + 1), measured.rows, measured.forwards)
        self._scale = scale_of(self._most)
        self._level_and_tilt = LevelAndTilt(HELD, HELD)
        self._steps = 0
        self._surprise = 0.0

    def seconds(
        self, requests: int, context: float, rows: int, forward: float, sampling: float
    ) -> float | None:
        """Of a plain step of so many decoding requests behind ``context`` tokens each; None where
        it is not known well enough.

        Learns from the step of theirs that had ``rows`` and took ``forward`` and ``sampling``
        seconds on the target; call it once for each.
        """
        if forward <= 0 or rows > self._most:
            return None
        expected = self._forward[rows] + self._measured.reading(requests, context)
        self._observe(rows, float(np.log(forward / expected)))
        if self._steps < FIRST_STEPS or abs(self._surprise) > UNSURE:
            return None
        own = forward + sampling
        if rows <= requests:
            return own
        moved = np.exp(self._level_and_tilt.moved(self._scale[requests]))
        return min(float(self._measured.seconds(requests, context) * moved), own)

    def _observe(self, rows: int, moved: float) -> None:
        """Learn from a forward whose time has moved so far from what was measured."""
        scale = self._scale[rows]
        known = float(self._level_and_tilt.moved(scale))
        surprise = min(max(moved - known, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self._level_and_tilt.observe(scale, known + surprise)
        self._surprise += (surprise - self._surprise) / MEMORY
        self._steps += 1
