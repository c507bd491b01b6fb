"""What a step costs by the rows that it verifies: measured first, corrected while serving."""

from __future__ import annotations

import numpy as np

MEMORY = 20.0
"""Steps after which an observation counts for 1/e."""
PRIOR = (0.01, 1.0)
"""How firmly level and tilt are held at 0, in observations: where all steps have one number of
rows, what they tell is the level."""
MEASURED = (5.0, 25.0)
"""The same for what was measured at the beginning, which is forgotten like an observation."""
SHAPE_STEP = 0.02
"""Weight of a new observation in what is particular to a number of rows."""
FORGETTING = 1e-3
"""How fast what is particular fades where it is not observed, so that it is tried again."""
LARGEST_SURPRISE = 0.3
"""Of the logarithm of an observation: one interrupted step must not move the estimate far."""

_KEPT = float(np.exp(-1 / MEMORY))


class LevelAndTilt:
    """How far costs have moved from what was measured, by rows, as a logarithm: recursive least
    squares that forget, and that hold level and tilt at 0 as firmly as ``prior`` says, at the
    beginning as ``measured`` does."""

    def __init__(self, measured: tuple[float, float], prior: tuple[float, float]) -> None:
        self._new = (1 - _KEPT) * np.diag(prior)
        self._information = np.diag(measured)
        self._learned = np.zeros(2)
        self._found = np.zeros(2)

    def moved(self, scale: np.ndarray) -> np.ndarray:
        """At rows of this ``scale``, as of `scale_of`."""
        moved: np.ndarray = scale @ self._found
        return moved

    def observe(self, scale: np.ndarray, moved: float) -> None:
        """Learn from an observation that has moved so far."""
        self._information = self._new + _KEPT * self._information + scale[:, None] * scale
        self._learned = _KEPT * self._learned + scale * moved
        self._found = np.linalg.solve(self._information, self._learned)


def scale_of(most: int) -> np.ndarray:
    """What level and tilt count for at 0 (as 1), 1, 2, … rows, [most + 1, 2]."""
    rows = np.maximum(np.arange(most + 1, dtype=np.float64), 1.0)
    return np.stack([np.ones(most + 1), np.log(rows)], axis=1)


class RowCost:
    """Seconds of a step's verification by its rows.

    The shape of the curve comes from the measurement that it begins with. Observations move its
    level (the machine is busier, contexts are longer), its tilt (cores are shared, so that rows
    cost more than memory does), and, more slowly, single points of it. All are logarithms, so that
    the curve stays positive. What it gives never falls as rows rise: of a kernel that is faster
    with more rows one can always have the more rows.
    """

    def __init__(self, rows: tuple[int, ...], seconds: tuple[float, ...], most: int) -> None:
        """``seconds`` of a step of each of ``rows``, ascending; between them, and behind the last
        with its slope, lines. ``most``: rows that will ever be asked for.

        Raises:
            ValueError: if rows do not ascend from 1, or seconds are not positive.
        """
        if len(rows) != len(seconds) or not rows or rows[0] != 1 or (np.diff(rows) <= 0).any():
            raise ValueError(f"rows={rows} must ascend from 1, with as many seconds")
        if min(seconds) <= 0:
            raise ValueError(f"seconds={seconds} must be above 0")
        self._rows = np.asarray(rows, dtype=np.float64)
        self._all = np.arange(most + 1, dtype=np.float64)
        self._log_measured = np.log(_line(self._all, self._rows, np.asarray(seconds)))
        # The point that an observation is credited to.
        middle = (self._rows[1:] + self._rows[:-1]) / 2
        self._point = np.searchsorted(middle, self._all)
        self._scale = scale_of(most)
        self._level_and_tilt = LevelAndTilt(MEASURED, PRIOR)
        self._own = np.zeros(len(rows))

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step of ``rows``."""
        rows = min(rows, len(self._all) - 1)
        scale, point = self._scale[rows], self._point[rows]
        moved = float(self._level_and_tilt.moved(scale))
        expected = self._log_measured[rows] + moved + self._own[point]
        surprise = _bounded(np.log(seconds) - expected)
        self._level_and_tilt.observe(scale, moved + surprise)
        self._own *= 1 - FORGETTING
        self._own[point] += SHAPE_STEP * surprise

    def seconds(self) -> np.ndarray:
        """Seconds by rows, from 0 (as 1) up to the most; they never fall."""
        moved = self._level_and_tilt.moved(self._scale) + self._own[self._point]
        curve = np.exp(self._log_measured + moved)
        least: np.ndarray = np.minimum.accumulate(curve[::-1])[::-1]
        return least


def followed(seconds: float, seen: float, memory: float = MEMORY) -> float:
    """An average of seconds after one more was ``seen``, as robust as `RowCost.observe`."""
    return seconds * float(np.exp(_bounded(np.log(max(seen, 1e-9) / seconds)) / memory))


def _bounded(surprise: float) -> float:
    return min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)


def _line(at: np.ndarray, rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The lines through the points; before the first its height, behind the last its slope."""
    inside: np.ndarray = np.interp(at, rows, seconds)
    if len(rows) == 1:
        return inside
    # Over the last half, as single points are noisy.
    middle = int(np.searchsorted(rows, rows[-1] / 2))
    middle = min(middle, len(rows) - 2)
    slope = max((seconds[-1] - seconds[middle]) / (rows[-1] - rows[middle]), 0.0)
    inside += np.maximum(at - rows[-1], 0.0) * slope
    return inside
