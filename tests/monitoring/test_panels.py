"""A real Prometheus answers the panels' own queries from made-up metrics."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import made_up
import pytest
import stack
from dashboards import DASHBOARDS, filled_in, legend, panels
from made_up import DEPTHS
from stack import Prometheus

from dyntree_plugin.metrics.names import PREFIX

pytestmark = pytest.mark.monitoring

WINDOW = "10s"
TARGETS = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']} {target['refId']}")
    for dashboard in DASHBOARDS.values()
    for panel in panels(dashboard)
    for target in panel["targets"]
]
BY_DEPTH = [each for each in TARGETS if "{{depth}}" in str(each.values[1])]
IN_ORDER = [f"{depth:02}" for depth in range(1, DEPTHS + 1)]


@pytest.fixture(scope="module")
def prometheus(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Yield a Prometheus that has scraped the made-up metrics long enough to rate them."""
    with (
        made_up.served() as address,
        stack.prometheus(tmp_path_factory.mktemp("prometheus"), address) as found,
    ):
        rated = f"rate({PREFIX}tree_nodes_count[{WINDOW}]) > 0"
        stack.wait_until(lambda: found.query(rated), 60, "two scrapes")
        yield found


def over_time(prometheus: Prometheus, expression: str) -> list[dict[str, str]]:
    """Return the labels of a range query's series, in the order of the answer."""
    return [json.loads(labels) for labels in prometheus.over_time(expression, 10, 1)]


@pytest.mark.parametrize(("expression", "form"), TARGETS)
def test_every_query_has_an_answer_of_finite_numbers_with_different_names(
    expression: str, form: str, prometheus: Prometheus
) -> None:
    found = prometheus.query(filled_in(expression, WINDOW))
    assert found
    assert all(math.isfinite(value) for _, value in found), found
    if "{{" in form:
        named = [legend(form, labels) for labels, _ in found]
        assert len(set(named)) == len(named)
        assert not any("{{" in name for name in named)


def test_an_engine_without_trees_counts_in_no_panel(prometheus: Prometheus) -> None:
    """The control: vLLM's own metric has three engines."""
    of_vllm = [each for each in TARGETS if re.search(r"\bvllm:(?!dyntree)", str(each.values[0]))]
    assert len(of_vllm) >= 8
    for target in of_vllm:
        engines = {
            labels["engine"]
            for labels, _ in prometheus.query(filled_in(str(target.values[0]), WINDOW))
            if "engine" in labels
        }
        assert engines in (set(), {engine for _, engine in made_up.ENGINES}), target.id
    (running,) = (t for t in of_vllm if t.id == "Requests A")
    ((_, shown),) = prometheus.query(filled_in(str(running.values[0]), WINDOW))
    ((_, everywhere),) = prometheus.query("sum(vllm:num_requests_running)")
    assert (shown, everywhere) == (1.0, 1.5)


@pytest.mark.parametrize(("expression", "form"), BY_DEPTH)
def test_a_range_query_gives_depths_in_their_order(
    expression: str, form: str, prometheus: Prometheus
) -> None:
    """As Grafana asks for these panels. An instant query has no order, so a panel sorts its
    names."""
    found = over_time(prometheus, filled_in(expression, WINDOW))
    assert [legend(form, labels) for labels in found] == IN_ORDER
    at_once = prometheus.query(filled_in(expression, WINDOW))
    assert sorted(legend(form, labels) for labels, _ in at_once) == IN_ORDER


def test_without_the_padding_a_range_query_has_the_order_of_text(prometheus: Prometheus) -> None:
    plain = f"sum by (depth) (rate({PREFIX}accepted_nodes_total[{WINDOW}]))"
    for expression in (plain, f"sort({plain})"):
        found = [labels["depth"] for labels in over_time(prometheus, expression)]
        assert found == sorted(map(str, range(1, DEPTHS + 1)))


def test_no_rule_fails_and_no_server_that_works_raises_that_it_is_not_active(
    prometheus: Prometheus,
) -> None:
    stack.wait_until(lambda: prometheus.query("model_name:dyntree_speed:ratio5m"), 30, "a rule")
    groups = stack.fetch(f"{prometheus.address}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not prometheus.query('ALERTS{alertname="DynTreeNotActive"}')
