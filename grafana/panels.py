"""Grafana's JSON: panels, their places, dashboards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTOR = 'model_name=~"$model_name",instance=~"$instance",engine=~"$engine"'
COLUMNS = 24
METRIC = re.compile(r"(?<![\w:])[a-z_]+:[a-z_:0-9]+")


def metrics_of(expression: str) -> list[str]:
    """The metrics that a PromQL expression names, without what it has in quotes."""
    return sorted(set(METRIC.findall(re.sub(r'"[^"]*"', "", expression))))


@dataclass(frozen=True)
class Query:
    """``now``: ask for the latest value alone, as a table does. ``buckets``: a heatmap's."""

    expression: str
    legend: str = ""
    now: bool = False
    buckets: bool = False

    def json(self, reference: str) -> dict[str, Any]:
        return {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": self.expression,
            "format": "table" if self.now else "heatmap" if self.buckets else "time_series",
            "instant": self.now,
            "legendFormat": self.legend or "__auto",
            "range": not self.now,
            "refId": reference,
        }


@dataclass(frozen=True)
class Panel:
    """``meaning``: how to read it; the metrics that it queries are added. ``unit``: as Grafana
    names units. ``lines``: where good ends, (value, colour) from the bottom up. ``custom`` and
    ``options``: of Grafana's panel type."""

    kind: str
    title: str
    meaning: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 12
    height: int = 8
    lines: Sequence[tuple[float | None, str]] = ()
    custom: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    transformations: Sequence[dict[str, Any]] = ()

    @property
    def metrics(self) -> list[str]:
        return sorted({name for query in self.queries for name in metrics_of(query.expression)})

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        names = ", ".join(f"`{name}`" for name in self.metrics)
        steps = [{"color": colour, "value": value} for value, colour in self.lines]
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "custom": self.custom or {},
            "noValue": "No traffic",
            "thresholds": {
                "mode": "absolute",
                "steps": steps or [{"color": "blue", "value": None}],
            },
        }
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": f"{self.meaning}\n\nMetrics: {names}.",
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self.options or {},
            "targets": [q.json(chr(ord("A") + i)) for i, q in enumerate(self.queries)],
            "transformations": list(self.transformations),
        }


def lines(title: str, meaning: str, *queries: Query, stacked: bool = False, **more: Any) -> Panel:
    """Values over time."""
    custom = {
        "drawStyle": "line",
        "fillOpacity": 40 if stacked else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if more.get("lines") else "off"},
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return Panel("timeseries", title, meaning, queries, custom=custom, options=options, **more)


def number(title: str, meaning: str, query: Query, **more: Any) -> Panel:
    """The latest value, large."""
    options = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }
    return Panel("stat", title, meaning, [query], options=options, width=4, height=5, **more)


def bars(title: str, meaning: str, *queries: Query, **more: Any) -> Panel:
    """The latest values beside each other."""
    options = {
        "displayMode": "gradient",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return Panel("bargauge", title, meaning, queries, options=options, **more)


def heatmap(title: str, meaning: str, query: Query, **more: Any) -> Panel:
    """Counts of a histogram's buckets over time."""
    options = {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
        "yAxis": {"unit": "short"},
    }
    return Panel("heatmap", title, meaning, [query], options=options, **more)


def table(title: str, meaning: str, columns: dict[str, str], hidden: Iterable[str]) -> Panel:
    """One row per label set; ``columns``: expression by heading, in order."""
    queries = [Query(expression, heading, now=True) for heading, expression in columns.items()]
    headings = {f"Value #{chr(ord('A') + i)}": heading for i, heading in enumerate(columns)}
    organize = {
        "excludeByName": dict.fromkeys(("Time", *hidden), True),
        "renameByName": headings if len(columns) > 1 else {"Value": next(iter(columns))},
    }
    steps = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": organize},
    ]
    return Panel("table", title, meaning, queries, width=COLUMNS, transformations=steps)


def dashboard(uid: str, title: str, meaning: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """A dashboard with its panels from left to right, row after row."""
    placed, x, y, tallest = [], 0, 0, 0
    for index, panel in enumerate(panels, start=1):
        if x + panel.width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        placed.append(panel.json(index, x, y))
        x, tallest = x + panel.width, max(tallest, panel.height)
    return {
        "uid": uid,
        "title": title,
        "description": meaning,
        "tags": ["dyntree", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "tags": ["dyntree"],
                "title": "dyntree",
                "type": "dashboards",
            }
        ],
        "templating": {"list": _variables()},
        "panels": placed,
    }


def _variables() -> list[dict[str, Any]]:
    datasource = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
    found, above = [datasource], ""
    for name, label in (("model_name", "Model"), ("instance", "Server"), ("engine", "Engine")):
        series = f"vllm:dyntree_config_info{{{above}}}" if above else "vllm:dyntree_config_info"
        found.append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"query": f"label_values({series}, {name})", "refId": name},
                "definition": f"label_values({series}, {name})",
                "refresh": 2,
                "includeAll": True,
                "multi": True,
                "current": {"text": ["All"], "value": ["$__all"]},
                "sort": 1,
            }
        )
        above = ",".join(part for part in (above, f'{name}=~"${name}"') if part)
    return found
