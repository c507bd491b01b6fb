"""Made-up metrics of two engines with trees, as a server exports them, and of one without."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import stack
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from dyntree_plugin.engine.step.clock import STAGES
from dyntree_plugin.metrics import names
from dyntree_plugin.tree.budget.row_cost import StepSeconds
from dyntree_plugin.tree.step import SOURCES

DEPTHS = 16
LABELS = ("model_name", "engine")
ENGINES = (("m", "0"), ("m", "1"))
WITHOUT_TREES = ("m", "2")
"""An engine that has vLLM's metrics alone."""

SECONDS = (0.01, 0.02, 0.05, 0.1, 1.0)
OF_VLLM = (
    names.Metric("vllm:generation_tokens", "counter", None, ""),
    names.Metric("vllm:num_requests_running", "gauge", None, ""),
    names.Metric("vllm:num_requests_waiting", "gauge", None, ""),
    names.Metric("vllm:kv_cache_usage_perc", "gauge", None, ""),
    names.Metric("vllm:inter_token_latency_seconds", "histogram", None, "", buckets=SECONDS),
    names.Metric(
        "vllm:request_time_per_output_token_seconds", "histogram", None, "", buckets=SECONDS
    ),
)


def label_values(metric: names.Metric) -> Sequence[tuple[str, ...]]:
    """Return the values of the metric's own labels; depths are not in their order."""
    if not metric.labels:
        return [()]
    if metric.labels == names.CONFIG_LABELS:
        return [metric.labels]
    (label,) = metric.labels
    depths = sorted(range(1, DEPTHS + 1), key=lambda depth: depth * 7 % 17)
    pruned = metric.source == "pruned"
    values: dict[str, Sequence[object]] = {
        "depth": depths,
        "reason": names.PRUNE_REASONS if pruned else names.FALLBACK_REASONS,
        "source": SOURCES,
        "stage": STAGES,
        "decoding": (names.TREE, names.PLAIN),
        "time": StepSeconds._fields,
        "model": (names.TARGET, names.DRAFT),
    }
    return [(str(value),) for value in values[label]]


def family(metric: names.Metric, seconds: float) -> Metric:
    """Return the metric after so many seconds of steady work."""
    labels = [*LABELS, *metric.labels]
    engines = [*ENGINES, WITHOUT_TREES] if metric in OF_VLLM else ENGINES
    series = [[*engine, *own] for engine in engines for own in label_values(metric)]
    if metric.kind == "gauge":
        gauge = GaugeMetricFamily(metric.name, metric.meaning, labels=labels)
        for values in series:
            gauge.add_metric(values, 0.5)
        return gauge
    if metric.kind == "counter":
        counter = CounterMetricFamily(metric.name, metric.meaning, labels=labels)
        for number, values in enumerate(series, start=1):
            counter.add_metric(values, seconds / number)
        return counter
    histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=labels)
    ends = [*(str(float(end)) for end in metric.buckets), "+Inf"]
    for values in series:
        buckets = [(end, seconds * (i + 1) / len(ends)) for i, end in enumerate(ends)]
        histogram.add_metric(values, buckets, 3 * seconds)
    return histogram


class MadeUp:
    """What prometheus_client collects; the counters grow with time."""

    def collect(self) -> Iterator[Metric]:
        seconds = time.time() % 10**6
        for metric in (*names.METRICS, *OF_VLLM):
            yield family(metric, seconds)


@contextmanager
def served() -> Iterator[str]:
    """Serve the made-up metrics; yield the address."""
    registry = CollectorRegistry()
    registry.register(MadeUp())  # type: ignore[arg-type]
    port = stack.free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
