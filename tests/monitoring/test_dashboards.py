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
from generated import DASHBOARDS, panel_of, panels
from stack import GRAFANA

from dyntree_plugin.metrics import names
from dyntree_plugin.metrics.names import METRICS

PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in panels(dashboard)
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
        for panel in panels(dashboard)
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


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_where_its_axis_begins_and_how_many_digits_it_shows(
    panel: dict[str, Any],
) -> None:
    if panel["type"] == "table":
        return  # every column says it; see below
    defaults = panel["fieldConfig"]["defaults"]
    assert {"unit", "decimals", "min"} <= defaults.keys()
    assert (defaults["unit"] == "percentunit") == ("max" in defaults)


def properties(panel: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the overrides of a series or column."""
    return {
        each["id"]: each["value"]
        for one in panel["fieldConfig"]["overrides"]
        if one["matcher"] == {"id": "byName", "options": name}
        for each in one["properties"]
    }


def test_every_column_of_numbers_has_a_unit_and_every_other_shows_text_as_it_is() -> None:
    table = panel_of("per_model_and_engine", "Engines")
    assert table["fieldConfig"]["defaults"]["unit"] == "string", "engine 0 is not 0.00"
    for target in table["targets"]:
        assert {"unit", "decimals"} <= properties(table, target["legendFormat"]).keys()
    assert properties(table, "Fallback")["unit"] == "percentunit"


def test_a_row_of_the_table_leads_to_the_other_dashboards_of_that_engine() -> None:
    table = panel_of("per_model_and_engine", "Engines")
    (organize,) = (one["options"] for one in table["transformations"] if one["id"] == "organize")
    labels = ("model_name", "job", "instance", "engine")
    headings = {label: organize["renameByName"][label] for label in labels}
    uids = set()
    for heading in headings.values():
        for link in properties(table, heading)["links"]:
            address, _, parameters = link["url"].partition("?")
            uids.add(address.removeprefix("/d/"))
            for label, other in headings.items():
                assert f"var-{label}=${{__data.fields.{other}:percentencode}}" in parameters
            assert "${datasource:queryparam}" in parameters
    assert uids == {board["uid"] for board in DASHBOARDS.values()} - {"dyntree-engines"}


def test_a_meaning_has_one_colour_and_no_fault_is_drawn_red() -> None:
    drawn: dict[str, set[str]] = {}
    for dashboard in DASHBOARDS.values():
        for one in panels(dashboard):
            for override in one["fieldConfig"]["overrides"]:
                name = override["matcher"]["options"]
                for each in override["properties"]:
                    if each["id"] == "color":
                        assert each["value"]["mode"] == "fixed"
                        drawn.setdefault(name, set()).add(each["value"]["fixedColor"])
    assert dict.fromkeys(drawn, 1) == {name: len(found) for name, found in drawn.items()}
    assert drawn["accepted"] != drawn["rejected"]
    assert {*names.FALLBACK_REASONS, *names.PRUNE_REASONS} <= drawn.keys()
    assert {name for name, found in drawn.items() if found == {"red"}} == {"rejected"}


def test_bars_stand_in_the_order_of_their_names_however_the_data_source_orders_them() -> None:
    found = [one for board in DASHBOARDS.values() for one in panels(board)]
    found = [one for one in found if one["type"] == "bargauge"]
    assert found
    for one in found:
        assert [step["id"] for step in one["transformations"]] == ["reduce", "sortBy"]
        assert one["options"]["reduceOptions"]["values"] is True
        assert properties(one, "Field")["unit"] == "string", "depth 01 is not 100 %"


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
