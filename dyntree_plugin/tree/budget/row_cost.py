"""Estimate the seconds of a step by its rows: measured at start-up, corrected while serving."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

MEMORY = 20.0
"""Steps after which an observation counts for 1/e, of quantities that are averaged."""
LARGEST_SURPRISE = 0.3
"""Bound of one such observation, a logarithm: one interrupted step must not move the average
far."""

LEVEL, TILT, NEAR, OWN = 0.5, 0.25, 0.3, 0.05
"""Standard deviations, of logarithms, of how far start-up may be off: for all rows alike, by the
logarithm of the rows, for numbers of rows that are similar, and for a single one."""
SIMILAR = 0.7
"""How far apart the logarithms of similar numbers of rows are."""
NOISE, DRIFT = 0.1, 0.01
"""Standard deviation of an observation, and of how far all rows move from one step to the next."""
KEPT = 1 - 1 / 500
"""Share of what was learned that a step keeps: rows not seen for long are unsure again."""
OUTLIER = 3.0
"""An observation counts as this many standard deviations at most: an interrupted step moves the
estimate little, and one of rows that nobody knows moves it far."""
FINE = 1.08
"""Ratio of the numbers of rows between which the correction is constant, from 13 rows on."""


class StepSeconds(NamedTuple):
    """The seconds of a step as an adaptive budget ``expected`` them, and as ``measured``.

    ``trying``: how much longer they were expected to be than those of the best choice for as many
    tokens, to try numbers of rows and of forwards.
    """

    expected: float
    measured: float
    trying: float = 0.0


class RowCost:
    """The seconds of a step's verification by its rows, and how sure they are.

    The measurement gives the shape of the curve. Its correction, a logarithm, is a Gaussian process
    over the rows, which observations condition one by one (Rasmussen and Williams, "Gaussian
    Processes for Machine Learning", 2006, equations 2.23 and 2.24): a level (the machine is busier,
    contexts are longer), a tilt (cores are shared, so arithmetic slows down more than memory), what
    similar numbers of rows share (blocks of a kernel), and what is a number's own. The curve never
    falls as rows rise: if a kernel is faster with more rows, a step can be padded to them.
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
        self._all = np.arange(most + 1, dtype=np.float64)
        # More rows take no less, so a number that took longer than a larger one was disturbed.
        least = np.minimum.accumulate(np.asarray(seconds)[::-1])[::-1]
        self._measured = _line(self._all, np.asarray(rows, np.float64), least)
        self._of_position = of_position
        corrected = _corrected(most)
        self._place = np.searchsorted((corrected[1:] + corrected[:-1]) / 2, self._all)
        at = np.log(corrected)
        apart = (at[:, None] - at) / SIMILAR
        shape = NEAR**2 * np.exp(-(apart**2) / 2) + OWN**2 * np.eye(len(at))
        self._mean = np.zeros(len(at))
        self._covariance = LEVEL**2 + TILT**2 * np.outer(at, at) + shape
        self._forgotten = (1 - KEPT**2) * shape + DRIFT**2

    def observe(self, rows: int, seconds: float, context: float = 0.0) -> float:
        """Learn from a step of ``rows``; return the seconds that were expected of it.

        ``context``: mean positions of the step's requests.
        """
        rows = min(rows, len(self._all) - 1)
        measured = self._measured[rows] + self._of_position * context * rows
        self._mean *= KEPT
        self._covariance *= KEPT**2
        self._covariance += self._forgotten
        with_this = self._covariance[self._place[rows]].copy()
        variance = with_this[self._place[rows]] + NOISE**2
        expected = float(measured * math.exp(self._mean[self._place[rows]]))
        surprise = math.log(seconds / expected)
        most = OUTLIER * math.sqrt(variance)
        self._mean += with_this * (min(max(surprise, -most), most) / variance)
        self._covariance -= np.outer(with_this, with_this) / variance
        return expected

    def seconds(
        self, most: int | None = None, context: float = 0.0, optimism: float = 0.0
    ) -> np.ndarray:
        """Return the seconds by rows, from 0 (as 1) up to ``most`` or all.

        They never fall without ``optimism``: standard deviations by which a number of rows may cost
        less, beyond those of the number that is known best. A well-known number does not become
        cheaper by an unknown larger one. ``context``: as in `observe`.
        """
        end = None if most is None else most + 1
        measured = self._measured[:end] + self._of_position * context * self._all[:end]
        curve = measured * np.exp(self._mean[self._place[:end]])
        least: np.ndarray = np.minimum.accumulate(curve[::-1])[::-1]
        if optimism:
            variance = np.diag(self._covariance)[self._place[:end]]
            least *= np.exp(-optimism * np.sqrt(variance - variance.min()))
        return least


def _corrected(most: int) -> np.ndarray:
    """Return the numbers of rows that are corrected, each for those near it."""
    rows = [1.0]
    while rows[-1] < most:
        rows.append(min(max(rows[-1] + 1, float(int(rows[-1] * FINE))), float(most)))
    return np.array(rows)


def followed(seconds: float, seen: float, memory: float = MEMORY) -> float:
    """Return the average ``seconds`` after another value ``seen``; see `LARGEST_SURPRISE`."""
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
