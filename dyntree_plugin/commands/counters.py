"""What the counters of engines with trees say of a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric

Labels = tuple[tuple[str, str], ...]
Series = dict[str, dict[Labels, float]]
"""The value of every series, by its name and its labels."""


def series_of(families: Iterable[Metric]) -> Series:
    found: Series = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return found


class Counters:
    """The increase of counters, and the gauges of now. Series that are not there are 0."""

    def __init__(self, now: Series, before: Series) -> None:
        self._now = now
        self._before = before

    def gauge(self, name: str) -> int:
        return int(sum(self._now.get(name, {}).values()))

    def total(self, name: str, **where: str) -> float:
        """Return the increase over all series that have these labels."""
        return sum(more for labels, more in self._grown(name) if where.items() <= labels.items())

    def by(self, label: str, name: str) -> dict[str, float]:
        """Return the increase for each value of a label."""
        sums: dict[str, float] = {}
        for labels, more in self._grown(name):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0) + more
        return sums

    def labels(self, name: str) -> dict[str, str]:
        return dict(next(iter(self._now.get(name, {})), ()))

    def _grown(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        before = self._before.get(name, {})
        for labels, value in self._now.get(name, {}).items():
            yield dict(labels), value - before.get(labels, 0)
