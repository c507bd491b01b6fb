"""Counters of speculation and of time, from an engine's metrics or from a server's page."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric

from dyntree_plugin.commands.bench.results import Speculation
from dyntree_plugin.metrics.names import PREFIX

_PREFIX = "vllm:spec_decode_num_"


def read(families: Iterable[Metric]) -> Speculation:
    """Summed over models and engines; 0 without speculation."""
    found = dict.fromkeys(Speculation.model_fields, 0)
    for family in families:
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
            if sample.name == f"{_PREFIX}{name}_total" and name in found:
                found[name] += round(sample.value)
    return Speculation(**found)


def growth(before: Speculation, after: Speculation) -> Speculation:
    earlier = before.model_dump()
    return Speculation(**{name: n - earlier[name] for name, n in after.model_dump().items()})


def stages(families: Iterable[Metric]) -> dict[str, float]:
    """Seconds so far by stage of an engine with trees; empty for one without."""
    name = PREFIX + "stage_seconds"
    return {
        sample.labels["stage"]: sample.value
        for family in families
        if family.name == name
        for sample in family.samples
        if sample.name == f"{name}_sum"
    }
