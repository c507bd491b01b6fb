"""The generated dashboards, without a server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from stack import GRAFANA

from dyntree_plugin.metrics.names import METRICS

DASHBOARDS = {
    path.stem: json.loads(path.read_text()) for path in (GRAFANA / "dashboards").glob("*.json")
}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, dashboard in sorted(DASHBOARDS.items())
    for panel in dashboard["panels"]
]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the generator's module."""
    monkeypatch.syspath_prepend(str(GRAFANA))
    import generate

    return generate


def test_the_generated_files_are_up_to_date(generate: Any) -> None:
    written = dict(generate.files())
    assert {path: path.read_text() for path in written} == written
    assert {path for path in written if path.suffix == ".json"} == set(
        (GRAFANA / "dashboards").iterdir()
    )


def test_check_fails_where_a_file_differs_and_writes_nothing(
    generate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stale = tmp_path / "stale.json"
    stale.write_text("{}")
    monkeypatch.setattr(generate, "FOLDER", tmp_path / "grafana")
    monkeypatch.setattr(generate, "files", lambda: iter([(stale, "{1}")]))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit, match=r"stale\.json would change"):
        generate.main()
    assert stale.read_text() == "{}"


def test_a_query_of_a_metric_that_no_code_defines_is_an_error(generate: Any) -> None:
    defined = generate.defined_metrics()
    assert generate.undefined(defined) == []
    missing = "vllm:dyntree_node_budget"
    assert any(missing in found for found in generate.undefined(defined - {missing}))


def test_every_metric_of_ours_is_on_some_dashboard() -> None:
    shown = {
        name
        for dashboard in DASHBOARDS.values()
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"vllm:\w+", target["expr"])
    }
    assert [m.name for m in METRICS if not shown & {*m.series}] == []


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_and_its_queries_parse(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        promql_parser.parse(target["expr"].replace("$__rate_interval", "1m"))
        for name in re.findall(r"vllm:\w+", target["expr"]):
            assert f"`{name}`" in panel["description"]
    assert len(panel["description"]) > 30
    assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_panels_neither_overlap_nor_leave_the_page(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells
        taken |= cells


def test_dashboards_can_be_told_apart_and_read() -> None:
    identities = [(dashboard["uid"], dashboard["title"]) for dashboard in DASHBOARDS.values()]
    assert len(set(identities)) == len(identities) == 3
    for dashboard in DASHBOARDS.values():
        variables = {variable["name"] for variable in dashboard["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard["panels"])))
        assert used - {"__rate_interval"} <= variables


def test_every_file_that_the_compose_file_mounts_is_here_and_every_image_is_pinned() -> None:
    services = yaml.safe_load((GRAFANA / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        for volume in service["volumes"]:
            assert (GRAFANA / volume.split(":")[0]).exists()
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/dyntree.yaml").read_text())
    (folder,) = (one["options"]["path"] for one in provider["providers"])
    mounted = {volume.split(":")[1] for volume in services["grafana"]["volumes"]}
    assert folder in mounted
