"""Requests limit the nodes of their trees: the tokens stay, and no more nodes are verified."""

from __future__ import annotations

from typing import Any

import pytest
import workload
from comparison import Outputs
from engine_process import Result, Run, serve
from limited import check_tokens, limited
from slow import marked

pytestmark = pytest.mark.e2e

REQUESTS = workload.each_kind(range(24))


RUNS = {
    "free": Run(REQUESTS),
    "mixed": limited(REQUESTS, 0, 3, None, 100, 1),
    "4": limited(REQUESTS, 4),
    "0": limited(REQUESTS, 0),
}
ENGINES: dict[str, dict[str, Any]] = {
    "adaptive": workload.with_options() | workload.STEADY,
    "fixed": workload.tree(),
    "head": workload.with_head(workload.pair.paths()["eagle3"], budget="fixed"),
}


@pytest.fixture(scope="module", params=marked(ENGINES, {"head"}))
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    return serve(ENGINES[request.param], RUNS, threads=1)


def test_the_tokens_are_those_without_trees(results: dict[str, Result], plain: Outputs) -> None:
    for result in results.values():
        check_tokens(REQUESTS, result, plain)


def test_no_more_nodes_are_verified_than_the_request_allows(
    results: dict[str, Result], request: pytest.FixtureRequest
) -> None:
    """Control: with a fixed budget and no limit, most trees have more."""
    metrics, most = results["4"].metrics, "vllm:dyntree_tree_nodes_bucket{le=4.0}"
    steps = "vllm:dyntree_tree_nodes_count"
    assert metrics[most] == metrics[steps]
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    if "adaptive" not in request.node.callspec.id:
        free = results["free"].metrics
        assert free[most] < 0.5 * free[steps]


def test_a_limit_of_0_decodes_plainly_and_is_counted(results: dict[str, Result]) -> None:
    metrics = results["0"].metrics
    steps = metrics["vllm:dyntree_tree_nodes_count"]
    assert metrics["vllm:dyntree_tree_nodes_sum"] == 0
    assert metrics["vllm:dyntree_fallback_steps_total{reason=empty_tree}"] == steps
    emitted = sum(len(output.tokens[0]) for output in results["0"].outputs if output)
    assert steps == emitted - len(REQUESTS)  # The first token of each is that of its prompt.


def test_no_tree_is_drafted_where_no_request_wants_one(results: dict[str, Result]) -> None:
    """The draft reads along, for requests that may come. Control: others draft more."""
    forwards = "vllm:dyntree_draft_forwards_total"
    stage = "vllm:dyntree_stage_seconds_count{stage=draft}"
    assert results["0"].metrics[stage] == 0 < results["4"].metrics[stage]
    assert results["0"].metrics[forwards] < results["4"].metrics[forwards]
