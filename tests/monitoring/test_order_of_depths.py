"""A panel by depth shows depths in the order of their numbers, which a real Prometheus must give.

No server of models runs here: the metrics are made up, and their depths are exposed out of order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import stack
from generated import DASHBOARDS, filled_in, legend, panels
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from stack import Prometheus

from dyntree_plugin.metrics.names import PREFIX

pytestmark = pytest.mark.monitoring

DEPTHS = 16
OWN = {"model_name": "m", "engine": "0"}
BY_DEPTH = [
    pytest.param(target["expr"], target["legendFormat"], id=panel["title"])
    for dashboard in DASHBOARDS.values()
    for panel in panels(dashboard)
    for target in panel["targets"]
    if "{{depth}}" in target["legendFormat"]
]


class MadeUp:
    """Counters that grow with time, as of an engine that works steadily."""

    def collect(self) -> Iterator[Metric]:
        seconds = time.time() % 10**6
        for name in ("proposed_nodes", "accepted_nodes", "estimated_accepted_tokens"):
            family = CounterMetricFamily(PREFIX + name, "Made up.", labels=[*OWN, "depth"])
            for depth in sorted(range(1, DEPTHS + 1), key=lambda depth: depth * 7 % 17):
                family.add_metric([*OWN.values(), str(depth)], seconds / depth)
            yield family
        steps = HistogramMetricFamily(PREFIX + "tree_nodes", "Made up.", labels=[*OWN])
        steps.add_metric([*OWN.values()], [("+Inf", seconds)], seconds)
        yield steps


@pytest.fixture(scope="module")
def made_up(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Yield a Prometheus that has scraped the made-up metrics long enough to rate them."""
    registry = CollectorRegistry()
    registry.register(MadeUp())  # type: ignore[arg-type]
    port = stack.free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry)
    with stack.prometheus(tmp_path_factory.mktemp("depths"), f"http://127.0.0.1:{port}") as found:
        rated = f"rate({PREFIX}tree_nodes_count[10s]) > 0"
        stack.wait_until(lambda: found.query(rated), 60, "two scrapes")
        yield found
    server.shutdown()
    thread.join()
    server.server_close()


def over_time(prometheus: Prometheus, expression: str) -> list[dict[str, str]]:
    """Return the labels of a range query's series, in the order of the answer."""
    return [json.loads(labels) for labels in prometheus.over_time(expression, 10, 1)]


IN_ORDER = [f"{depth:02}" for depth in range(1, DEPTHS + 1)]


def test_some_panels_are_by_depth() -> None:
    assert len(BY_DEPTH) == 3


@pytest.mark.parametrize(("expression", "form"), BY_DEPTH)
def test_a_range_query_gives_depths_in_their_order(
    expression: str, form: str, made_up: Prometheus
) -> None:
    """As Grafana asks for these panels. It keeps the order of series."""
    found = over_time(made_up, filled_in(expression, "10s"))
    assert [legend(form, labels) for labels in found] == IN_ORDER


@pytest.mark.parametrize(("expression", "form"), BY_DEPTH)
def test_an_instant_query_gives_names_that_grafana_sorts_into_the_order_of_depths(
    expression: str, form: str, made_up: Prometheus
) -> None:
    """Prometheus promises no order of an instant query, so the panel sorts the names as text."""
    found = [labels for labels, _ in made_up.query(filled_in(expression, "10s"))]
    assert sorted(legend(form, labels) for labels in found) == IN_ORDER


def test_without_the_padding_a_range_query_has_the_order_of_text(made_up: Prometheus) -> None:
    plain = f"sum by (depth) (rate({PREFIX}accepted_nodes_total[10s]))"
    for expression in (plain, f"sort({plain})"):
        found = [labels["depth"] for labels in over_time(made_up, expression)]
        assert found == sorted(map(str, range(1, DEPTHS + 1)))
