"""The dashboard that has the figures of every engine."""

from __future__ import annotations

import formulas as f
from at_a_glance import PAYS
from colours import BAD, GOOD
from formulas import ratio
from in_depth import RIGHT
from page import VARIABLES
from panels import (
    COUNT,
    MEAN_COUNT,
    RATIO,
    SECONDS,
    SHARE,
    Column,
    Panel,
    Query,
    lines,
    table,
)
from scopes import BY_ENGINE, SPEED

from dyntree_plugin.metrics.names import CONFIG_LABELS, PREFIX

S = BY_ENGINE
LEGEND = "{{model_name}} {{instance}} engine {{engine}}"
KEYS = {name: VARIABLES[name] for name in S.by}


def rows() -> dict[str, list[Panel]]:
    return {"Now": _now(), "Over time": _over_time()}


def link(uid: str, title: str) -> dict[str, str | bool]:
    """A link from a table's row to another dashboard, with that engine chosen."""
    chosen = "&".join(
        f"var-{name}=${{__data.fields.{heading}:percentencode}}" for name, heading in KEYS.items()
    )
    url = f"/d/{uid}?${{datasource:queryparam}}&{chosen}&${{__url_time_range}}"
    return {"title": title, "url": url, "targetBlank": False}


def _now() -> list[Panel]:
    budget, info = S.series(PREFIX + "node_budget"), S.series(PREFIX + "config_info")
    options = ", ".join((*S.by, *CONFIG_LABELS))
    links = [
        link("dyntree-glance", "This engine at a glance"),
        link("dyntree-depth", "This engine in depth"),
    ]
    chain = [(None, GOOD), (0.2, BAD)]
    return [
        table(
            "Engines",
            "Every engine of every model, now. A link in the first columns leads to the other "
            "dashboards of that engine.",
            KEYS,
            {
                "Acceptance length": Column(f.acceptance_length(S), RATIO),
                "Speed": Column(f.speed(S), RATIO, PAYS),
                "Tokens per step": Column(f.tokens_per_step(S), MEAN_COUNT),
                "Node efficiency": Column(f.node_efficiency(S), SHARE),
                "Calibration": Column(f.calibration(S), RATIO, RIGHT),
                "Fallback": Column(f.fallback_share(S), SHARE, chain),
                "Node budget": Column(f"max by ({', '.join(S.by)}) ({budget})", COUNT),
                "Tokens per second": Column(S.rate("vllm:generation_tokens_total"), COUNT),
                "KV cache usage": Column(S.total(S.gauge("vllm:kv_cache_usage_perc")), SHARE),
            },
            links=links,
        ),
        table(
            "Options in force",
            "The plugin's version and its options, by engine.",
            KEYS,
            {"in force": Column(f"max by ({options}) ({info})", COUNT)},
            hidden=["Value"],
        ),
    ]


def _over_time() -> list[Panel]:
    target = 'stage="target"'
    seconds = S.rate(PREFIX + "stage_seconds_sum", target)
    return [
        lines(
            "Acceptance length",
            "Tokens that a decoding request gets per step. An engine that differs from its "
            "peers of one model serves other requests than they do.",
            RATIO,
            Query(f.acceptance_length(S), LEGEND),
        ),
        lines("Speed against no speculation", SPEED, RATIO, Query(f.speed(S), LEGEND), lines=PAYS),
        lines(
            "Target forward",
            "Mean time of the target's forward.",
            SECONDS,
            Query(ratio(seconds, S.rate(PREFIX + "stage_seconds_count", target)), LEGEND),
        ),
        lines(
            "Requests running",
            "How the load is spread.",
            COUNT,
            Query(S.total(S.gauge("vllm:num_requests_running")), LEGEND),
        ),
        lines(
            "Fallback",
            "Share of the decoding requests' steps whose tree was a chain, because sampling needs "
            "its order.",
            SHARE,
            Query(f.fallback_share(S), LEGEND),
        ),
        lines(
            "Calibration",
            "Accepted tokens against those that the trees' own values expected.",
            RATIO,
            Query(f.calibration(S), LEGEND),
            lines=RIGHT,
        ),
    ]
