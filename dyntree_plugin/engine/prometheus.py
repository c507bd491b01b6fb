"""The plugin's metrics in vLLM's own Prometheus registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

from dyntree_plugin.engine.config import is_marked
from dyntree_plugin.engine.requests import CHAIN_REASONS, EMPTY_TREE
from dyntree_plugin.engine.stats import TreeSpecDecodingStats
from dyntree_plugin.engine.timing import STAGES
from dyntree_plugin.metrics.names import METRICS, Metric


class TreeSpecDecodingProm(SpecDecodingProm):
    """vLLM's speculation counters, and ours where the engine speculates with trees.

    vLLM makes it in every process that serves metrics; what it observes came through the
    engine's own stats channel.
    """

    def __init__(
        self,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(speculative_config, labelnames, per_engine_labelvalues, *args, **kwargs)
        self._families: list[tuple[Metric, Counter | Histogram]] = []
        self._labels = {index: tuple(values) for index, values in per_engine_labelvalues.items()}
        if speculative_config is None or not is_marked(speculative_config):
            return
        for metric in METRICS:
            names = [*labelnames, *metric.labels]
            family: Counter | Histogram
            if metric.kind == "histogram":
                family = Histogram(metric.name, metric.meaning, names, buckets=metric.buckets)
            else:
                family = Counter(metric.name, metric.meaning, names)
            self._families.append((metric, family))
        for labels in self._labels.values():
            self._start_at_zero(labels)

    def _start_at_zero(self, labels: tuple[object, ...]) -> None:
        """Make every series exist from the start, so that a rate sees its first event."""
        known = {"reason": (*CHAIN_REASONS, EMPTY_TREE), "stage": STAGES}
        for metric, family in self._families:
            if not metric.labels:
                family.labels(*labels)
            for value in known.get(metric.labels[0], ()) if metric.labels else ():
                family.labels(*labels, value)

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        super().observe(spec_decoding_stats, engine_idx)
        if not isinstance(spec_decoding_stats, TreeSpecDecodingStats):
            return
        labels = self._labels[engine_idx]
        for metric, family in self._families:
            value = getattr(spec_decoding_stats, metric.source)
            if isinstance(family, Histogram):
                series = family.labels(*labels)
                for one in value:
                    series.observe(one)
            elif metric.labels:
                for label, amount in _items(value):
                    family.labels(*labels, label).inc(amount)
            else:
                family.labels(*labels).inc(value)


def _items(value: Mapping[str, float] | list[int]) -> Iterator[tuple[str, float]]:
    """Label value and amount: a mapping's own, or a list's by position from 1."""
    if isinstance(value, Mapping):
        yield from value.items()
    else:
        yield from ((str(index), amount) for index, amount in enumerate(value, start=1))
