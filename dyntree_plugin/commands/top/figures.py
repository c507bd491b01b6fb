"""Compute an engine's figures from its counters, as the dashboards do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dyntree_plugin.commands.counters import Counters, Series
from dyntree_plugin.commands.top.page import Page
from dyntree_plugin.metrics.names import PREFIX


@dataclass(frozen=True)
class Figures:
    """An engine's figures over ``seconds``, or since its start if that is None.

    A figure is None without data. ``acceptance_length``: tokens per request and step, the bonus
    token included. ``tokens_per_step``: tokens of all decoding requests per forward of the target.
    ``speed``: estimated ratio to no speculation, from the metric ``compared_seconds``.
    ``calibration``: ratio of accepted tokens to those that the trees' values predicted.
    ``reached``: shares of request steps whose accepted path is at least 1, 2, … deep. ``sources``:
    shares of the accepted tokens by source. ``stage_seconds``: seconds per forward of the target.
    ``pruned``: nodes per request step.
    """

    model_name: str
    engine: str
    seconds: float | None
    configuration: dict[str, str]
    node_budget: int
    running: int
    waiting: int
    request_steps: int
    tokens_per_second: float | None
    acceptance_length: float | None
    tokens_per_step: float | None
    speed: float | None
    node_efficiency: float | None
    nodes: float | None
    calibration: float | None
    fallback_share: float | None
    fallbacks: dict[str, float]
    pruned: dict[str, float]
    reached: list[float]
    sources: dict[str, float]
    stage_seconds: dict[str, float]


def figures(now: Page, before: Page | None = None) -> list[Figures]:
    """Return every engine's figures since ``before`` or since its start, whichever is later."""
    figures = []
    for key, series in sorted(now.engines.items(), key=lambda engine: _order(*engine[0])):
        earlier = {} if before is None else before.engines.get(key, {})
        if _has_restarted(series, earlier):
            earlier = {}
        seconds = None if before is None else now.seconds - before.seconds
        figures.append(_engine_figures(*key, seconds, Counters(series, earlier)))
    return figures


def _order(model_name: str, engine: str) -> tuple[str, int, str]:
    """Return a key that sorts engine 2 before engine 10."""
    return model_name, int(engine) if engine.isdecimal() else -1, engine


def _has_restarted(now: Series, before: Series) -> bool:
    """Return whether a count has decreased. Sums of seconds may decrease by rounding."""
    return any(
        now.get(name, {}).get(labels, 0) < value
        for name, values in before.items()
        if name.startswith(PREFIX) and name.endswith("_count")
        for labels, value in values.items()
    )


def _ratio(part: float, whole: float) -> float | None:
    ratio = part / whole if whole > 0 else math.inf
    return ratio if math.isfinite(ratio) else None


def _engine_figures(model_name: str, engine: str, seconds: float | None, c: Counters) -> Figures:
    steps = c.total(f"{PREFIX}tree_nodes_count")
    nodes = c.total(f"{PREFIX}tree_nodes_sum")
    accepted = c.total(f"{PREFIX}accepted_path_tokens_sum")
    fallbacks = c.by("reason", f"{PREFIX}fallback_steps_total")
    chained = sum(steps for reason, steps in fallbacks.items() if reason != "empty_tree")
    by_depth = c.by("depth", f"{PREFIX}accepted_nodes_total")
    by_source = c.by("source", f"{PREFIX}accepted_nodes_by_source_total")
    forwards = c.total(f"{PREFIX}stage_seconds_count", stage="target")
    compared = c.by("decoding", f"{PREFIX}compared_seconds_total")
    length = _ratio(accepted, steps)
    return Figures(
        model_name=model_name,
        engine=engine,
        seconds=seconds,
        configuration=c.labels(f"{PREFIX}config_info"),
        node_budget=c.gauge(f"{PREFIX}node_budget"),
        running=c.gauge("vllm:num_requests_running"),
        waiting=c.gauge("vllm:num_requests_waiting"),
        request_steps=int(steps),
        tokens_per_second=seconds and _ratio(c.total("vllm:generation_tokens_total"), seconds),
        acceptance_length=None if length is None else 1 + length,
        tokens_per_step=_ratio(steps + accepted, forwards),
        speed=_ratio(compared.get("plain", 0), compared.get("tree", 0)),
        node_efficiency=_ratio(accepted, nodes),
        nodes=_ratio(nodes, steps),
        calibration=_ratio(accepted, c.total(f"{PREFIX}estimated_accepted_tokens_total")),
        fallback_share=_ratio(chained, steps),
        fallbacks=_shares(fallbacks, steps),
        pruned=_shares(c.by("reason", f"{PREFIX}pruned_nodes_total"), steps),
        reached=list(_shares(by_depth, steps).values()),
        sources=_shares(by_source, sum(by_source.values())),
        stage_seconds=_shares(c.by("stage", f"{PREFIX}stage_seconds_sum"), forwards),
    )


def _shares(parts: dict[str, float], whole: float) -> dict[str, float]:
    """Return the ratio of each part to the whole, without zeros."""
    shares = {name: _ratio(part, whole) for name, part in parts.items() if part}
    return {name: share for name, share in shares.items() if share is not None}
