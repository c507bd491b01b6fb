"""Put the plugin's metrics into vLLM's Prometheus registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

from dyntree_plugin import __version__
from dyntree_plugin.engine.configuration import plan_in_force
from dyntree_plugin.engine.step.clock import STAGES
from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats
from dyntree_plugin.metrics.names import (
    CONFIG_LABELS,
    DRAFT,
    FALLBACK_REASONS,
    METRICS,
    PLAIN,
    PRUNE_REASONS,
    TARGET,
    TREE,
    Metric,
)
from dyntree_plugin.tree.budget.row_cost import StepSeconds
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.step import SOURCES

Family = Counter | Gauge | Histogram

_ADDS = {Counter: "inc", Gauge: "set", Histogram: "observe"}


class TreeSpecDecodingProm(SpecDecodingProm):
    """vLLM's speculation counters, and ours if the engine speculates with trees.

    vLLM makes it in every process that serves metrics.
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
        self._series: dict[int, list[tuple[Metric, _Series]]] = {}
        plan = plan_in_force(speculative_config)
        if plan is None:
            return
        families = [(metric, _family(metric, labelnames)) for metric in METRICS]
        for engine, labels in per_engine_labelvalues.items():
            self._series[engine] = [(m, _Series(family, labels)) for m, family in families]
            self._begin(self._series[engine], plan)

    def _begin(self, series: list[tuple[Metric, _Series]], plan: TreePlan) -> None:
        """Create every series at the start, so that a rate counts its first event."""
        for metric, by_label in series:
            for values in _label_values(metric, plan):
                add = by_label[values]
                if metric.kind == "gauge":
                    add(1 if metric.source is None else plan.shape.node_budget)

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        super().observe(spec_decoding_stats, engine_idx)
        if not isinstance(spec_decoding_stats, TreeSpecDecodingStats):
            return
        for metric, by_label in self._series.get(engine_idx, ()):
            if metric.source is None:
                continue
            value = getattr(spec_decoding_stats, metric.source)
            if metric.labels:
                # An item of a list has its position as its label.
                items = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
                for label, amounts in items:
                    for amount in _listed(amounts):
                        if amount:  # Most series of a counter have nothing to add.
                            by_label[label,](amount)
            else:
                for amount in _listed(value):
                    by_label[()](amount)


def _listed(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


class _Series(dict[tuple[object, ...], Callable[[float], None]]):
    """What adds a value to each series of a metric of an engine, by label values.

    It is kept because prometheus_client takes as long to look a series up as to count.
    """

    def __init__(self, family: Family, labels: list[object]) -> None:
        super().__init__()
        self._family = family
        self._labels = labels

    def __missing__(self, values: tuple[object, ...]) -> Callable[[float], None]:
        series: Any = self._family.labels(*self._labels, *values)
        self[values] = getattr(series, _ADDS[type(self._family)])
        return self[values]


def _family(metric: Metric, labelnames: list[str]) -> Family:
    names = [*labelnames, *metric.labels]
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.meaning, names, buckets=metric.buckets)
    if metric.kind == "gauge":
        # Of several API servers, the value of the one that the engine reported to last.
        return Gauge(metric.name, metric.meaning, names, multiprocess_mode="mostrecent")
    return Counter(metric.name, metric.meaning, names)


def _label_values(metric: Metric, plan: TreePlan) -> list[tuple[object, ...]]:
    """Return the label values of every series that a metric can have."""
    if not metric.labels:
        return [()]
    if metric.labels == CONFIG_LABELS:
        in_force = {"version": __version__, **plan.in_force()}
        # An empty label: the growth does not read this parameter.
        return [tuple(str(in_force.get(label, "")) for label in CONFIG_LABELS)]
    (label,) = metric.labels
    values: dict[str, Iterable[object]] = {
        "depth": range(1, plan.shape.max_depth + 1),
        "reason": PRUNE_REASONS if metric.source == "pruned" else FALLBACK_REASONS,
        "source": SOURCES,
        "model": (TARGET, DRAFT),
        "stage": STAGES,
        "decoding": (TREE, PLAIN),
        "time": StepSeconds._fields,
    }
    return [(value,) for value in values[label]]
