"""The dashboards, without a server."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from dashboards import DASHBOARDS, panels
from stack import GRAFANA

from dyntree_plugin.metrics.names import METRICS

PANELS = [panel for dashboard in DASHBOARDS.values() for panel in panels(dashboard)]
FORMULAS = {target["expr"] for panel in PANELS for target in panel["targets"]}
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def recorded() -> dict[str, str]:
    """Return what Prometheus records for the alerts: the expression by name."""
    rules = yaml.safe_load((GRAFANA / "prometheus" / "recording.yml").read_text())
    return {each["record"]: each["expr"] for each in rules["groups"][0]["rules"]}


def metrics_of(expression: str) -> set[str]:
    """Return the metrics that a PromQL expression names, without what it has in quotes."""
    return {*re.findall(r"(?<![\w:])[a-z_]+:[a-z_:0-9]+", re.sub(r'"[^"]*"', "", expression))}


def defined() -> set[str]:
    """Return the names that can be queried: ours by kind, and vLLM's as its source spells them."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    code = Path(spec.origin).parent / "v1"
    texts = [(code / name).read_text() for name in ("metrics/loggers.py", "spec_decode/metrics.py")]
    of_vllm = re.findall(r'"(vllm:[a-z0-9_]+)"', "".join(texts))
    return {name for metric in METRICS for name in metric.series} | {
        name + suffix for name in of_vllm for suffix in SUFFIXES
    }


def undefined(known: set[str]) -> set[str]:
    """Return the metrics of panels and rules that are not ``known``."""
    return {name for each in (*FORMULAS, *recorded().values()) for name in metrics_of(each)} - known


def test_every_metric_that_is_queried_is_defined_by_some_code() -> None:
    assert undefined(defined()) == set()
    missing = "vllm:dyntree_node_budget"
    assert undefined(defined() - {missing}) == {missing}


def test_alerts_read_what_the_panels_show() -> None:
    """A rule is the formula of some panel, over all that is served instead of what is chosen."""

    def everywhere(expression: str) -> str:
        chosen = re.sub(r'(job|model_name|instance|engine)=~"\$\1",?', "", expression)
        over = chosen.replace(",}", "}").replace("{}", "").replace("$__rate_interval", "5m")
        return re.sub(r"sum by \([\w, ]*\) ", "sum", over)

    shown = [everywhere(each) for each in FORMULAS]
    alone = [
        name
        for name, rule in recorded().items()
        if not any(everywhere(rule) in one for one in shown)
    ]
    assert alone == []


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


def test_a_series_has_one_colour_on_all_panels() -> None:
    found: dict[str, set[str]] = {}
    for panel in PANELS:
        for override in panel["fieldConfig"]["overrides"]:
            for one in override["properties"]:
                if one["id"] == "color":
                    name, colour = override["matcher"]["options"], one["value"]["fixedColor"]
                    found.setdefault(name, set()).add(colour)
    assert len(found) > 10
    assert {name: colours for name, colours in found.items() if len(colours) > 1} == {}


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
