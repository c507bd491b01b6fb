"""Grafana's JSON for panels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colours import NEUTRAL, fixed, override

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
METRIC = re.compile(r"(?<![\w:])[a-z_]+:[a-z_:0-9]+")

Steps = Sequence[tuple[float | None, str]]
"""Where good ends: value and colour, from the bottom up."""


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
class Scale:
    """Unit as Grafana names it, digits after the point, and the ends of the axis."""

    unit: str
    decimals: int
    most: float | None = None
    least: float = 0

    def json(self) -> dict[str, Any]:
        ends = {"min": self.least} | ({} if self.most is None else {"max": self.most})
        return {"unit": self.unit, "decimals": self.decimals, **ends}


RATIO = Scale("short", 2)
COUNT = Scale("short", 0)
MEAN_COUNT = Scale("short", 1)
SHARE = Scale("percentunit", 1, most=1)
SECONDS = Scale("s", 1)
NAME = Scale("string", 0)
"""Text that may look like a number, such as an engine's."""


@dataclass(frozen=True)
class Panel:
    """``meaning``: how to read it; the metrics that it queries are added. ``named``: the series
    that a legend of labels can name, for their colours. ``custom`` and ``options``: of Grafana's
    panel type."""

    kind: str
    title: str
    meaning: str
    queries: Sequence[Query]
    scale: Scale
    named: Sequence[str] = ()
    width: int = 12
    height: int = 8
    lines: Steps = ()
    colour: str = "thresholds"
    custom: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[Mapping[str, Any]] = ()
    transformations: Sequence[Mapping[str, Any]] = ()

    @property
    def metrics(self) -> list[str]:
        return sorted({name for query in self.queries for name in metrics_of(query.expression)})

    @property
    def series(self) -> list[str]:
        """The names of the series that have a colour of their own."""
        legends = [q.legend for q in self.queries if q.legend and "{{" not in q.legend]
        return [] if self.kind == "table" else [*legends, *self.named]

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        names = ", ".join(f"`{name}`" for name in self.metrics)
        defaults: dict[str, Any] = {
            **self.scale.json(),
            "color": {"mode": self.colour},
            "custom": dict(self.custom),
            "noValue": "No traffic",
            "thresholds": thresholds(self.lines or [(None, NEUTRAL)]),
        }
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": f"{self.meaning}\n\nMetrics: {names}.",
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {
                "defaults": defaults,
                "overrides": [*map(fixed, self.series), *self.overrides],
            },
            "options": dict(self.options),
            "targets": [q.json(chr(ord("A") + i)) for i, q in enumerate(self.queries)],
            "transformations": list(self.transformations),
        }


def thresholds(lines: Steps) -> dict[str, Any]:
    steps = [{"color": colour, "value": value} for value, colour in lines]
    return {"mode": "absolute", "steps": steps}


def lines(
    title: str, meaning: str, scale: Scale, *queries: Query, stacked: bool = False, **more: Any
) -> Panel:
    """Values over time. A series without a meaning of its own has the colour of its name."""
    custom = {
        "drawStyle": "line",
        "fillOpacity": 40 if stacked else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if more.get("lines") else "off"},
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    more = {"colour": "palette-classic-by-name", "custom": custom, "options": options, **more}
    return Panel("timeseries", title, meaning, queries, scale, **more)


def number(title: str, meaning: str, scale: Scale, query: Query, **more: Any) -> Panel:
    """The latest value, large."""
    options = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }
    return Panel("stat", title, meaning, [query], scale, options=options, width=4, height=5, **more)


def bars(title: str, meaning: str, scale: Scale, query: Query, **more: Any) -> Panel:
    """The latest values beside each other, in the order of their names.

    A data source orders the series of a range query by their labels, and those of an instant query
    as it likes. So Grafana reduces the series to a table of names and values, and sorts that.
    """
    options = {
        "displayMode": "gradient",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": True, "limit": 100},
    }
    steps = [
        {"id": "reduce", "options": {"mode": "seriesToRows", "reducers": ["lastNotNull"]}},
        {"id": "sortBy", "options": {"sort": [{"field": "Field"}]}},
    ]
    names = override("Field", unit=NAME.unit)
    more = {"options": options, "overrides": [names], "transformations": steps, **more}
    return Panel("bargauge", title, meaning, [query], scale, **more)


def heatmap(title: str, meaning: str, scale: Scale, query: Query, **more: Any) -> Panel:
    """Counts of a histogram's buckets over time."""
    options = {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
        "yAxis": {"unit": "short", "decimals": 0},
    }
    return Panel("heatmap", title, meaning, [query], scale, options=options, **more)


@dataclass(frozen=True)
class Column:
    """A column of a table: what it shows, as which number, and where good ends."""

    expression: str
    scale: Scale
    lines: Steps = ()

    def json(self, heading: str) -> dict[str, Any]:
        coloured = {
            "custom__cellOptions": {"type": "color-text"},
            "thresholds": thresholds(self.lines),
        }
        return override(heading, **self.scale.json(), **(coloured if self.lines else {}))


def table(
    title: str,
    meaning: str,
    keys: Mapping[str, str],
    columns: Mapping[str, Column],
    hidden: Iterable[str] = (),
    links: Sequence[Mapping[str, Any]] = (),
) -> Panel:
    """One row per label set. ``keys``: headings of the labels that come first, by label, which
    have the ``links``. ``columns`` by heading, in order."""
    queries = [Query(one.expression, name, now=True) for name, one in columns.items()]
    values = [f"Value #{chr(ord('A') + i)}" for i in range(len(columns))]
    values = ["Value"] if len(columns) == 1 else values
    organize = {
        "excludeByName": dict.fromkeys(("Time", *hidden), True),
        "indexByName": {name: i for i, name in enumerate([*keys, *values])},
        "renameByName": {**keys, **dict(zip(values, columns, strict=True))},
    }
    overrides = [one.json(name) for name, one in columns.items()]
    if links:
        overrides += [override(heading, links=list(links)) for heading in keys.values()]
    return Panel(
        "table",
        title,
        meaning,
        queries,
        NAME,
        width=COLUMNS,
        overrides=overrides,
        options={"showHeader": True, "cellHeight": "sm"},
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": organize},
        ],
    )
