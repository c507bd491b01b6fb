"""What the counters of engines with trees say of a time."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric

Series = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and value of every series, by name."""


def series_of(families: Iterable[Metric]) -> Series:
    found: Series = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


class Counters:
    """The increase of counters, and the gauges of now. Series that are not there are 0."""

    def __init__(self, now: Series, before: Series) -> None:
        self._now = now
        self._before = before

    def gauge(self, name: str) -> int:
        return int(sum(value for _, value in self._now.get(name, ())))

    def total(self, name: str, **where: str) -> float:
        """Return the increase over all series that have these labels."""
        return _total(self._now, name, where) - _total(self._before, name, where)

    def by(self, label: str, name: str) -> dict[str, float]:
        """Return the increase for each value of a label."""
        now, before = (_sums(series, name, label) for series in (self._now, self._before))
        return {value: total - before.get(value, 0) for value, total in now.items()}

    def labels(self, name: str) -> dict[str, str]:
        return next((labels for labels, _ in self._now.get(name, ())), {})


def _total(series: Series, name: str, where: dict[str, str]) -> float:
    return sum(value for labels, value in series.get(name, ()) if where.items() <= labels.items())


def _sums(series: Series, name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in series.get(name, ()):
        if label in labels:
            sums[labels[label]] = sums.get(labels[label], 0) + value
    return sums
