"""The generated dashboards, without a server."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest
import yaml
from generated import DASHBOARDS, panels
from stack import GRAFANA

from dyntree_plugin.metrics.names import METRICS

PANELS = [panel for dashboard in DASHBOARDS.values() for panel in panels(dashboard)]


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


def test_a_query_of_a_metric_that_no_code_defines_is_an_error(generate: Any) -> None:
    defined = generate.defined_metrics()
    assert generate.undefined(defined) == []
    missing = "vllm:dyntree_node_budget"
    assert any(missing in found for found in generate.undefined(defined - {missing}))


def test_every_metric_of_ours_is_on_some_dashboard() -> None:
    shown = {
        name
        for dashboard in DASHBOARDS.values()
        for panel in panels(dashboard)
        for target in panel["targets"]
        for name in re.findall(r"vllm:\w+", target["expr"])
    }
    assert [m.name for m in METRICS if not shown & {*m.series}] == []


def test_a_panel_says_what_it_shows_and_its_queries_parse() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            promql_parser.parse(target["expr"].replace("$__rate_interval", "1m"))
            for name in re.findall(r"vllm:\w+", target["expr"]):
                assert f"`{name}`" in panel["description"], panel["title"]
        assert len(panel["description"]) > 30
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_panels_neither_overlap_nor_leave_the_page(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert (place["w"] == 24) >= (panel["type"] == "row")
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
        # $1 is a group of a regular expression in PromQL.
        used = set(re.findall(r"\$\{?([a-z_]\w*)\}?", json.dumps(dashboard["panels"])))
        assert used - {"__rate_interval", "__data", "__url_time_range"} <= variables
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(numbers)) == len(numbers)
        assert dashboard["panels"][0]["type"] == "row"


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
