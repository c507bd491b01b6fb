"""The rules of Grafana's dashboard-linter, for the generated dashboards.

Each test has the name of the linter's rule. Where one is stricter here, it says so.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import promql_parser
import pytest
from generated import DASHBOARDS, filled_in, panels

Dashboard = dict[str, Any]
Rule = Callable[[Dashboard], Iterator[str]]

RATE_INTERVAL = timedelta(seconds=11)
"""What stands for $__rate_interval: a time that no query has of its own."""

UNITS = {"none", "short", "percentunit", "s", "string"}
"""Those of Grafana's units that these dashboards use."""

COUNTERS = ("_total", "_sum", "_count", "_bucket")


def variable(dashboard: Dashboard, name: str) -> dict[str, Any]:
    found = [one for one in dashboard["templating"]["list"] if one["name"] == name]
    return found[0] if found else {}


def expressions(dashboard: Dashboard) -> Iterator[tuple[str, str]]:
    """Yield the title of a panel and one of its queries."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def nodes(expression: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield every node of a parsed query with the nodes that it stands in, outermost first."""
    filled = expression.replace("$__rate_interval", "11s")
    yield from _below(promql_parser.parse(filled), ())


def _below(node: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    yield node, above
    parts = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")]
    parts += [getattr(node, "vector_selector", None), *getattr(node, "args", ())]
    for part in parts:
        if part is not None:
            yield from _below(part, (*above, node))


def template_datasource(dashboard: Dashboard) -> Iterator[str]:
    found = [one for one in dashboard["templating"]["list"] if one["type"] == "datasource"]
    if [(one["name"], one["label"], one["query"]) for one in found] != [
        ("datasource", "Data source", "prometheus")
    ]:
        yield "no variable for a data source of Prometheus"


def template_job_and_instance(dashboard: Dashboard) -> Iterator[str]:
    """Stricter: every choice has a value for All, the model and the engine too."""
    for name in ("job", "instance", "model_name", "engine"):
        found = variable(dashboard, name)
        if found.get("type") != "query" or found["datasource"]["uid"] != "${datasource}":
            yield f"{name} is not asked of the data source"
        elif name in ("job", "instance") and found["label"] != name.title():
            yield f"{name} has the label {found['label']}"
        elif not found["multi"] or found.get("allValue") != ".+":
            yield f"{name} is not a choice of several or all"


def template_label_promql(dashboard: Dashboard) -> Iterator[str]:
    for one in dashboard["templating"]["list"]:
        if one["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"])
            if asked is None or asked[2] != one["name"]:
                yield f"{one['name']} is none of a label's values"
            else:
                promql_parser.parse(asked[1])


def template_on_time_change_reload(dashboard: Dashboard) -> Iterator[str]:
    for one in dashboard["templating"]["list"]:
        if one["type"] == "query" and one["refresh"] != 2:
            yield f"{one['name']} is not asked again for another time"


def panel_datasource(dashboard: Dashboard) -> Iterator[str]:
    """Stricter: the queries too."""
    for panel in panels(dashboard):
        for one in (panel, *panel["targets"]):
            if one["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
                yield f"{panel['title']} has a data source of its own"


def panel_title_description(dashboard: Dashboard) -> Iterator[str]:
    """Stricter: no panel without, of any kind, and rows have titles."""
    for panel in dashboard["panels"]:
        if not panel["title"] or not (panel["type"] == "row" or panel["description"]):
            yield f"panel {panel['id']} has no title or description"


def panel_units(dashboard: Dashboard) -> Iterator[str]:
    """Stricter: panels of every kind, and every override."""
    for panel in panels(dashboard):
        found = [panel["fieldConfig"]["defaults"].get("unit")]
        for override in panel["fieldConfig"]["overrides"]:
            found += [one["value"] for one in override["properties"] if one["id"] == "unit"]
        if not {*found} <= UNITS:
            yield f"{panel['title']} has a unit that Grafana does not have"


def panel_no_targets(dashboard: Dashboard) -> Iterator[str]:
    for panel in panels(dashboard):
        if not panel["targets"]:
            yield f"{panel['title']} asks nothing"


def target_promql(dashboard: Dashboard) -> Iterator[str]:
    for title, expression in expressions(dashboard):
        try:
            promql_parser.parse(filled_in(expression, "1m"))
        except ValueError as error:
            yield f"{title}: {error}"


def target_rate_interval(dashboard: Dashboard) -> Iterator[str]:
    for title, expression in expressions(dashboard):
        for node, _ in nodes(expression):
            if isinstance(node, promql_parser.MatrixSelector) and node.range != RATE_INTERVAL:
                yield f"{title}: {expression} has a range of its own"


def target_job_and_instance(dashboard: Dashboard) -> Iterator[str]:
    """Stricter: the model and the engine too."""
    for title, expression in expressions(dashboard):
        for node, _ in nodes(expression):
            if isinstance(node, promql_parser.VectorSelector):
                found = {
                    each.name: each.value
                    for each in node.matchers.matchers
                    if each.op == promql_parser.MatchOp.Re
                }
                for name in ("job", "instance", "model_name", "engine"):
                    if found.get(name) != f"${name}":
                        yield f"{title}: {node.name} of every {name}"


def target_counter_agg(dashboard: Dashboard) -> Iterator[str]:
    """Stricter: the parts of histograms too."""
    for title, expression in expressions(dashboard):
        for node, above in nodes(expression):
            if isinstance(node, promql_parser.VectorSelector) and node.name.endswith(COUNTERS):
                call = above[-2] if len(above) > 1 else None
                if not isinstance(call, promql_parser.Call) or call.func.name not in (
                    *("rate", "irate", "increase"),
                ):
                    yield f"{title}: {node.name} without a rate"


def uneditable(dashboard: Dashboard) -> Iterator[str]:
    if dashboard["editable"]:
        yield "what is edited here would be lost"


RULES: list[Rule] = [
    template_datasource,
    template_job_and_instance,
    template_label_promql,
    template_on_time_change_reload,
    panel_datasource,
    panel_title_description,
    panel_units,
    panel_no_targets,
    target_promql,
    target_rate_interval,
    target_job_and_instance,
    target_counter_agg,
    uneditable,
]


@pytest.mark.parametrize("name", DASHBOARDS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_dashboard_keeps_the_rule(rule: Rule, name: str) -> None:
    assert list(rule(DASHBOARDS[name])) == []


def spoiled() -> dict[Rule, tuple[Any, ...]]:
    """Return what breaks each rule: a path in the dashboard, and what is put there."""
    choice = ("templating", "list", 1)
    panel = ("panels", 1)
    asked = (*panel, "targets", 0, "expr")
    chosen = ",".join(f'{name}=~"${name}"' for name in ("job", "instance", "model_name", "engine"))
    return {
        template_datasource: ("templating", "list", 0, "label", "Source"),
        template_job_and_instance: (*choice, "allValue", None),
        template_label_promql: (*choice, "query", "query", "job_values(up)"),
        template_on_time_change_reload: (*choice, "refresh", 1),
        panel_datasource: (*panel, "datasource", "uid", "P1"),
        panel_title_description: (*panel, "description", ""),
        panel_units: (*panel, "fieldConfig", "defaults", "unit", "tokens"),
        panel_no_targets: (*panel, "targets", []),
        target_promql: (*asked, "sum(up"),
        target_rate_interval: (*asked, f"rate(a_total{{{chosen}}}[1m])"),
        target_job_and_instance: (*asked, 'up{job=~"$job"}'),
        target_counter_agg: (*asked, f"sum(a_total{{{chosen}}})"),
        uneditable: ("editable", True),
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_dashboard_that_breaks_a_rule_is_found(rule: Rule) -> None:
    dashboard = copy.deepcopy(DASHBOARDS["tree_at_a_glance"])
    *path, key, value = spoiled()[rule]
    place: Any = dashboard
    for step in path:
        place = place[step]
    place[key] = value
    assert len(list(rule(dashboard))) > 0
