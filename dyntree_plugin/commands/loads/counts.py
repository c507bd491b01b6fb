"""Read counters of speculation and of time, from an engine's metrics or a server's page."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric

from dyntree_plugin.commands.loads.runs import Fallbacks, Speculation
from dyntree_plugin.metrics.names import PREFIX

_PREFIX = "vllm:spec_decode_num_"


def read(families: Iterable[Metric]) -> Speculation:
    """Sum the counters over models and engines; they are 0 without speculation."""
    counts = dict.fromkeys(Speculation.model_fields, 0)
    for family in families:
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
            if sample.name == f"{_PREFIX}{name}_total" and name in counts:
                counts[name] += round(sample.value)
    return Speculation(**counts)


def fallbacks(families: Iterable[Metric]) -> Fallbacks:
    """Sum the counts over models and engines; they are 0 without trees."""
    steps, reasons = 0, dict[str, int]()
    for family in families:
        for sample in family.samples:
            if sample.name == f"{PREFIX}tree_nodes_count":
                steps += round(sample.value)
            elif sample.name == f"{PREFIX}fallback_steps_total":
                reason = sample.labels["reason"]
                reasons[reason] = reasons.get(reason, 0) + round(sample.value)
    return Fallbacks(request_steps=steps, by_reason=reasons)


def growth_of_fallbacks(before: Fallbacks, after: Fallbacks) -> Fallbacks:
    """Return the increase, without reasons that did not occur."""
    grown = {
        reason: count - before.by_reason.get(reason, 0) for reason, count in after.by_reason.items()
    }
    return Fallbacks(
        request_steps=after.request_steps - before.request_steps,
        by_reason={reason: count for reason, count in grown.items() if count},
    )


def request_steps(before: Iterable[Metric], after: Iterable[Metric], tokens: int) -> int:
    """Return the steps of single requests after those of their first tokens.

    ``tokens``: those of all answers. If more were generated, there were other requests, and the
    result is 0.
    """
    generated, steps = (
        _sum(after, name) - _sum(before, name)
        for name in ("vllm:generation_tokens_total", "vllm:inter_token_latency_seconds_count")
    )
    return steps if generated == tokens else 0


def _sum(families: Iterable[Metric], name: str) -> int:
    samples = (sample for family in families for sample in family.samples)
    return round(sum(sample.value for sample in samples if sample.name == name))


def growth(before: Speculation, after: Speculation) -> Speculation:
    earlier = before.model_dump()
    return Speculation(**{name: n - earlier[name] for name, n in after.model_dump().items()})


def stages(families: Iterable[Metric]) -> dict[str, float]:
    """Return the seconds by stage of an engine with trees; empty for one without."""
    name = PREFIX + "stage_seconds"
    return {
        sample.labels["stage"]: sample.value
        for family in families
        if family.name == name
        for sample in family.samples
        if sample.name == f"{name}_sum"
    }
