"""One colour for each meaning, the same on every panel."""

from __future__ import annotations

from typing import Any

from dyntree_plugin.metrics import names

GOOD, DOUBTFUL, BAD = "green", "orange", "red"
NEUTRAL = "blue"

COLOURS = {
    # What becomes of nodes.
    "accepted": "green",
    "rejected": "red",
    "budget": "purple",
    names.BUDGET: "purple",
    names.SCHEDULER: "orange",
    # Steps of requests with a chain or no tree. A step without a node is no fault, so it is gray.
    names.LOGITS_PROCESSORS: "orange",
    names.EMPTY_TREE: "#8e8e8e",
    # Where nodes come from.
    "draft": "blue",
    "look_up": "yellow",
    "both": "green",
    # Stages, besides draft: the target's are dark, those that a plain step lacks are light.
    "target": "dark-purple",
    "sample": "purple",
    "place": "light-orange",
    "verify": "orange",
    "catch_up": "light-blue",
    # Requests.
    "running": "green",
    "waiting": "orange",
    # Statistics.
    "mean": "green",
    "median": "blue",
    "99 %": "orange",
    # Shapes of trees.
    "nodes": "blue",
    "depth": "purple",
    "median depth": "light-purple",
    # What stands alone on its panel.
    "all depths": "blue",
    "share": "blue",
    "draft forwards": "blue",
    "tokens": "blue",
}


def fixed(name: str) -> dict[str, Any]:
    """An override that gives the series of this name the colour of its meaning."""
    colour = {"mode": "fixed", "fixedColor": COLOURS[name]}
    return override(name, color=colour)


def override(name: str, /, **properties: Any) -> dict[str, Any]:
    """An override of a series or column; a property's name may have ``__`` for a dot."""
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [
            {"id": key.replace("__", "."), "value": value} for key, value in properties.items()
        ],
    }
