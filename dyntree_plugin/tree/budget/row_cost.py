"""Estimate the seconds of a step by its rows: measured at start-up, corrected while serving."""

from __future__ import annotations

import math

import numpy as np

MEMORY = 20.0
"""Steps after which an observation counts for 1/e."""
PRIOR = (0.01, 1.0)
"""Weight, in observations, that draws level and tilt to 0. If all steps have one number of rows,
they show the level only."""
MEASURED = (5.0, 25.0)
"""The same weight at the start, for the measurement; it fades like an observation."""
SHAPE_STEP = 0.02
"""Weight of a new observation in the deviation of a single number of rows."""
FORGETTING = 1e-3
"""Share of such a deviation that fades with each observation, so that the rows are tried again."""
LARGEST_SURPRISE = 0.3
"""Bound of one observation, a logarithm: one interrupted step must not move the estimate far."""

_KEPT = math.exp(-1 / MEMORY)


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

    def curve(self, log_rows: np.ndarray) -> np.ndarray:
        """Return the logarithms at rows whose logarithms are ``log_rows``."""
        return self._level + self._tilt * log_rows

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


class RowCost:
    """The seconds of a step's verification by its rows.

    The measurement gives the shape of the curve. Observations move its level (the machine is
    busier, contexts are longer), its tilt (cores are shared, so arithmetic slows down more than
    memory) and, more slowly, single points. All are logarithms, so the curve stays positive. It
    never falls as rows rise: if a kernel is faster with more rows, a step can be padded to them.
    """

    def __init__(
        self,
        rows: tuple[int, ...],
        seconds: tuple[float, ...],
        most: int,
        of_position: float = 0.0,
    ) -> None:
        """Start from ``seconds`` of steps of ``rows`` without context; the rows ascend.

        The curve is linear between the points and after the last. ``most`` is the largest number
        of rows that will be asked for. ``of_position``: the seconds that each position of context
        adds to a row.

        Raises:
            ValueError: if rows do not ascend from 1, or seconds are not positive.
        """
        if len(rows) != len(seconds) or not rows or rows[0] != 1 or (np.diff(rows) <= 0).any():
            raise ValueError(f"rows={rows} must ascend from 1, with as many seconds")
        if min(seconds) <= 0:
            raise ValueError(f"seconds={seconds} must be above 0")
        self._rows = np.asarray(rows, dtype=np.float64)
        self._all = np.arange(most + 1, dtype=np.float64)
        self._measured = _line(self._all, self._rows, np.asarray(seconds))
        self._of_position = of_position
        # The point that an observation is credited to.
        middle = (self._rows[1:] + self._rows[:-1]) / 2
        self._point = np.searchsorted(middle, self._all)
        self._log_rows = np.log(np.maximum(self._all, 1.0))
        self._level_and_tilt = LevelAndTilt(MEASURED, PRIOR)
        self._offset = np.zeros(len(rows))

    def observe(self, rows: int, seconds: float, context: float = 0.0) -> None:
        """Learn from a step of ``rows`` whose requests have ``context`` positions on average."""
        rows = min(rows, len(self._all) - 1)
        point = self._point[rows]
        moved = self._level_and_tilt.moved(rows)
        measured = self._measured[rows] + self._of_position * context * rows
        expected = math.log(measured) + float(self._offset[point]) + moved
        surprise = _bounded(math.log(seconds) - expected)
        self._level_and_tilt.observe(rows, moved + surprise)
        self._offset *= 1 - FORGETTING
        self._offset[point] += SHAPE_STEP * surprise

    def seconds(self, most: int | None = None, context: float = 0.0) -> np.ndarray:
        """Return the seconds by rows, from 0 (as 1) up to ``most`` or all; they never fall.

        ``context``: as in `observe`.
        """
        end = None if most is None else most + 1
        moved = self._level_and_tilt.curve(self._log_rows[:end]) + self._offset[self._point[:end]]
        measured = self._measured[:end] + self._of_position * context * self._all[:end]
        curve = measured * np.exp(moved)
        least: np.ndarray = np.minimum.accumulate(curve[::-1])[::-1]
        return least


def followed(seconds: float, seen: float, memory: float = MEMORY) -> float:
    """Return the average ``seconds`` after another value ``seen``, bounded as in `RowCost`."""
    return seconds * math.exp(_bounded(math.log(max(seen, 1e-9) / seconds)) / memory)


def _bounded(surprise: float) -> float:
    return min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)


def _line(at: np.ndarray, rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Interpolate between the points, and continue after the last with the slope before it."""
    inside: np.ndarray = np.interp(at, rows, seconds)
    if len(rows) == 1:
        return inside
    # The slope of the last half, since single points are noisy.
    middle = int(np.searchsorted(rows, rows[-1] / 2))
    middle = min(middle, len(rows) - 2)
    slope = max((seconds[-1] - seconds[middle]) / (rows[-1] - rows[middle]), 0.0)
    inside += np.maximum(at - rows[-1], 0.0) * slope
    return inside
