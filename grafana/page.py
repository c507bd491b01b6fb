"""Grafana's JSON for a dashboard: its rows and variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from panels import COLUMNS, DATASOURCE, Panel

VARIABLES = {"job": "Job", "model_name": "Model", "instance": "Instance", "engine": "Engine"}
"""What can be chosen: heading by label. The choices of each depend on those above it."""

SELECTOR = ",".join(f'{name}=~"${name}"' for name in VARIABLES)


def dashboard(
    uid: str, title: str, meaning: str, rows: Mapping[str, Sequence[Panel]]
) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "description": meaning,
        "tags": ["dyntree", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        # It is generated: what is changed in Grafana would be lost.
        "editable": False,
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
        "templating": {"list": [_datasource(), *_choices(), _filters()]},
        "panels": _placed(rows),
    }


def _placed(rows: Mapping[str, Sequence[Panel]]) -> list[dict[str, Any]]:
    """Each row's heading, and its panels from left to right, line after line."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows.items():
        placed.append(_heading(title, len(placed) + 1, y))
        x, y, tallest = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            placed.append(panel.json(len(placed) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return placed


def _heading(title: str, number: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        "panels": [],
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }


def _choices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    above = ""
    for name, label in VARIABLES.items():
        series = f"vllm:dyntree_config_info{{{above}}}" if above else "vllm:dyntree_config_info"
        found.append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"query": f"label_values({series}, {name})", "refId": name},
                "refresh": 2,
                "includeAll": True,
                # Without it, All becomes an alternation of every value, in every query.
                "allValue": ".+",
                "multi": True,
                "current": {"text": ["All"], "value": ["$__all"]},
                "sort": 1,
            }
        )
        above = ",".join(part for part in (above, f'{name}=~"${name}"') if part)
    return found


def _filters() -> dict[str, Any]:
    """Further conditions on any label, which Grafana adds to every query."""
    return {"name": "filters", "label": "Filters", "type": "adhoc", "datasource": DATASOURCE}
