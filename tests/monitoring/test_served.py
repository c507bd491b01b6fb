"""A real Prometheus knows of a real server what the server's clients received."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

import pytest
import stack
import traffic
from dashboards import DASHBOARDS, filled_in, panel_of, panels
from prometheus_client.multiprocess import MultiProcessCollector
from stack import Prometheus, Server
from traffic import Received

from dyntree_plugin.metrics.names import METRICS, PREFIX

pytestmark = [pytest.mark.e2e, pytest.mark.monitoring]

WINDOW = "30s"
JOB = '{job="vllm"}'


COUNTED = {
    "steps": f"{PREFIX}tree_nodes_count",
    "nodes": f"{PREFIX}tree_nodes_sum",
    "accepted": f"{PREFIX}accepted_path_tokens_sum",
    "by depth": f"{PREFIX}accepted_nodes_total",
    "by source": f"{PREFIX}accepted_nodes_by_source_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens": "vllm:generation_tokens_total",
}


def totals(prometheus: Prometheus) -> dict[str, float]:
    return {name: prometheus.value(f"sum({metric}{JOB})") for name, metric in COUNTED.items()}


def fallbacks(prometheus: Prometheus) -> dict[str, float]:
    """Return the steps of requests by fallback reason."""
    found = prometheus.query(f"sum by (reason) ({PREFIX}fallback_steps_total{JOB})")
    return {labels["reason"]: value for labels, value in found}


@pytest.fixture(scope="module")
def exchange(server: Server, prometheus: Prometheus) -> tuple[Received, dict[str, float]]:
    """Return what clients received, and the increase of Prometheus' totals."""
    stack.wait_until(lambda: prometheus.query(f"{PREFIX}config_info{JOB}"), 30, "a first scrape")
    before = totals(prometheus)
    received = Received.of(
        [a for _ in range(3) for a in stack.complete(server.address, traffic.MIXED)]
    )
    tokens = before["tokens"] + received.tokens
    stack.wait_until(lambda: totals(prometheus)["tokens"] >= tokens, 30, "a scrape of the rest")
    after = totals(prometheus)
    return received, {name: after[name] - before[name] for name in after}


def test_the_counters_are_what_the_clients_received(
    exchange: tuple[Received, dict[str, float]],
) -> None:
    received, gained = exchange
    assert gained["tokens"] == received.tokens
    assert gained["drafts"] == received.steps > 0
    assert gained["nodes"] == gained["draft tokens"] == received.nodes
    assert gained["accepted"] == gained["accepted tokens"] == received.accepted
    assert gained["by depth"] == gained["by source"] == received.accepted == sum(received.paths)


def test_two_processes_have_served_the_clients_and_add_up(
    server: Server, exchange: tuple[Received, dict[str, float]]
) -> None:
    by_process = [
        sum(
            sample.value
            for family in MultiProcessCollector.merge([str(path)])
            for sample in family.samples
            if sample.name == COUNTED["tokens"]
        )
        for path in (server.log.parent / stack.COUNTERS).glob("counter_*.db")
    ]
    assert len([tokens for tokens in by_process if tokens]) == 2
    assert sum(by_process) >= exchange[0].tokens


def test_every_token_that_a_client_received_is_of_a_prompt_or_of_a_counted_step(
    exchange: tuple[Received, dict[str, float]],
) -> None:
    received, gained = exchange
    emitted = received.requests + gained["steps"] + gained["accepted"]
    # The last path of a request may go beyond its end.
    assert received.tokens <= emitted <= received.tokens + 8 * received.requests


def test_steps_without_a_tree_are_counted_with_their_reason(
    exchange: tuple[Received, dict[str, float]], prometheus: Prometheus
) -> None:
    _, gained = exchange
    by_reason = fallbacks(prometheus)
    assert {reason for reason, steps in by_reason.items() if steps} == {"empty_tree"}
    # vLLM counts no draft for a step without a node to verify.
    assert by_reason["empty_tree"] == gained["steps"] - gained["drafts"]


def test_a_request_is_told_its_own_acceptance(server: Server) -> None:
    (answer,) = stack.complete(server.address, traffic.free(1))
    told = answer["metrics"]["speculative_decoding"]
    accepted, drafted = told["per_step_accepted"], told["per_step_drafted"]
    assert len(accepted) == len(drafted) == told["num_spec_steps"]
    assert told["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)
    assert max(drafted) <= 16
    emitted = 1 + sum(accepted) + len(accepted)
    tokens = answer["usage"]["completion_tokens"]
    # A step that verified nothing gives a token and is none of these steps.
    assert sum(accepted) < emitted <= tokens


QUERIES = [
    pytest.param(target["expr"], id=f"{name}: {panel['title']} {target['refId']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in panels(dashboard)
    for target in panel["targets"]
]


@pytest.fixture(scope="module")
def under_traffic(server: Server, prometheus: Prometheus) -> Prometheus:
    """Return Prometheus after enough requests of every kind to know the speed of plain steps."""
    compared = f"sum(rate({PREFIX}compared_seconds_total{JOB}[{WINDOW}]))"
    for turn in range(12):
        stack.complete(server.address, traffic.MIXED)
        time.sleep(2)
        if turn and prometheus.value(compared) > 0:
            break
    return prometheus


@pytest.mark.parametrize("expression", QUERIES)
def test_a_panel_shows_finite_numbers(expression: str, under_traffic: Prometheus) -> None:
    found = under_traffic.query(filled_in(expression, WINDOW))
    # The server's budget is fixed, and expects no seconds.
    assert bool(found) != (f"{PREFIX}budget_seconds" in expression)
    assert all(math.isfinite(value) for _, value in found), found


def test_what_panels_show_is_what_the_counters_say(under_traffic: Prometheus) -> None:
    table = panel_of("per_model_and_engine", "Engines")
    shown = {target["legendFormat"]: target["expr"] for target in table["targets"]}
    assert 1 < under_traffic.value(filled_in(shown["Acceptance length"], WINDOW)) < 9
    assert 0 < under_traffic.value(filled_in(shown["Node efficiency"], WINDOW)) < 1
    # Steps without a node to verify are none, and no tree had to be a chain.
    assert under_traffic.value(filled_in(shown["Fallback"], WINDOW)) == 0
    assert under_traffic.value(filled_in(shown["Node budget"], WINDOW)) == 16
    assert under_traffic.value(filled_in(shown["Speed"], WINDOW)) > 0


def test_without_relabelling_names_arrive_rewritten_and_with_it_never(
    prometheus: Prometheus,
) -> None:
    stack.wait_until(lambda: prometheus.query("vllm_probe"), 30, "a scrape")
    assert {labels["job"] for labels, _ in prometheus.query("vllm_probe")} == {"raw"}
    stack.wait_until(lambda: prometheus.query("vllm:probe"), 30, "a scrape")
    assert {labels["job"] for labels, _ in prometheus.query("vllm:probe")} == {"relabelled"}


def test_every_metric_of_the_table_reaches_prometheus(under_traffic: Prometheus) -> None:
    for metric in METRICS:
        for name in metric.series:
            assert under_traffic.query(f"{name}{JOB}"), name


def test_dyntree_top_shows_the_same_figures(server: Server, under_traffic: Prometheus) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "dyntree_plugin.cli", "top", server.address, "--once", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    (engine,) = json.loads(shown.stdout)["engines"]
    counted = totals(under_traffic)
    assert engine["acceptance_length"] == pytest.approx(1 + counted["accepted"] / counted["steps"])
    assert engine["node_efficiency"] == pytest.approx(counted["accepted"] / counted["nodes"])
    assert engine["fallback_share"] == 0, "no tree had to be a chain"
    assert engine["node_budget"] == 16
