"""Read counts of speculation and times from the counters of an engine."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric

from dyntree_plugin.commands.counters import Counters, series_of
from dyntree_plugin.commands.loads.runs import Fallbacks, Speculation
from dyntree_plugin.metrics.names import PREFIX


def grown(before: Iterable[Metric], after: Iterable[Metric]) -> Counters:
    """Return the increase of all counters, over models and engines."""
    return Counters(series_of(after), series_of(before))


def speculation(counters: Counters) -> Speculation:
    names = Speculation.model_fields
    prefix = "vllm:spec_decode_num_"
    return Speculation(**{name: round(counters.total(f"{prefix}{name}_total")) for name in names})


def fallbacks(counters: Counters) -> Fallbacks:
    """Return the fallbacks, without reasons that did not occur."""
    by_reason = counters.by("reason", f"{PREFIX}fallback_steps_total")
    return Fallbacks(
        request_steps=round(counters.total(f"{PREFIX}tree_nodes_count")),
        by_reason={reason: round(count) for reason, count in by_reason.items() if count},
    )


def stages(counters: Counters) -> dict[str, float]:
    """Return the seconds by stage of an engine with trees; empty for one without."""
    return counters.by("stage", f"{PREFIX}stage_seconds_sum")
