"""The dashboards in grafana/dashboards, for the tests here."""

from __future__ import annotations

import json
import re
from typing import Any

from stack import GRAFANA

DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((GRAFANA / "dashboards").glob("*.json"))
}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels that show something: all but the headings of rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_of(dashboard: str, title: str) -> dict[str, Any]:
    """Return the panel of this title."""
    (found,) = (one for one in panels(DASHBOARDS[dashboard]) if one["title"] == title)
    return found


def filled_in(expression: str, window: str) -> str:
    """Return the expression as Grafana asks it, with everything chosen."""
    expression = expression.replace("$__rate_interval", window)
    return re.sub(r"\$(job|model_name|instance|engine)\b", ".+", expression)


def legend(form: str, labels: dict[str, str]) -> str:
    """Return the name of a series as Grafana makes it of the series' labels."""
    for name, value in labels.items():
        form = form.replace(f"{{{{{name}}}}}", value)
    return form
