"""Grafana's own models read the dashboards and write them back without loss.

They drop what Grafana does not know, so a misspelt or misplaced field is found here.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from dashboards import DASHBOARDS
from stack import GRAFANA

SDK = "grafana-foundation-sdk"

WHY = f"{SDK} is not installed: it is in the extra dev"
encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason=WHY)
plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason=WHY)
models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=WHY)


@pytest.fixture(scope="module", autouse=True)
def _models_of_panels_and_queries() -> None:
    plugins.register_default_plugins()


def read_and_written(dashboard: dict[str, Any]) -> Any:
    model = models.Dashboard.from_json(copy.deepcopy(dashboard))
    return json.loads(encoder.JSONEncoder().encode(model))


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the path of everything in ``ours`` that ``theirs`` lacks or has otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key, lost), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (value, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(value, other, f"{path}[{index}]")
    elif ours != theirs:
        yield path


@pytest.mark.parametrize("name", DASHBOARDS)
def test_nothing_is_lost(name: str) -> None:
    assert list(lost(DASHBOARDS[name], read_and_written(DASHBOARDS[name]))) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    dashboard = copy.deepcopy(DASHBOARDS["tree_in_depth"])
    dashboard["panels"][1]["options"]["orientaton"] = "vertical"
    dashboard["panels"][1]["targets"][0]["instnt"] = True
    dashboard["templating"]["list"][1]["allvalue"] = ".+"
    assert sorted(lost(dashboard, read_and_written(dashboard))) == [
        ".panels[1].options.orientaton",
        ".panels[1].targets[0].instnt",
        ".templating.list[1].allvalue",
    ]


def test_the_models_are_those_of_the_grafana_that_the_compose_file_starts() -> None:
    services = yaml.safe_load((GRAFANA / "compose.yaml").read_text())["services"]
    _, _, started = services["grafana"]["image"].partition(":")
    _, _, modelled = importlib.metadata.version(SDK).rpartition("!")
    assert started.split(".")[:2] == modelled.split(".")[:2]
