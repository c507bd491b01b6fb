"""Requests limit the nodes of their trees: no more are verified. `test_identity` has the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from engine_process import Result
from slow import marked
from workload import SLOW_ENGINES

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]
NODES = "vllm:dyntree_tree_nodes_%s"


@pytest.fixture(params=marked(["tree", "fixed", "head alone"], SLOW_ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_no_more_nodes_are_verified_than_the_request_allows(engine: str, served: Served) -> None:
    """Control: with a fixed budget and no limit, most trees have more."""
    results = served(engine)
    metrics, most, steps = results["4 nodes"].metrics, NODES % "bucket{le=4.0}", NODES % "count"
    assert metrics[most] == metrics[steps]
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    if engine != "tree":
        free = results["acceptance"].metrics
        assert free[most] < 0.5 * free[steps]


def test_a_limit_of_0_decodes_plainly_and_is_counted(engine: str, served: Served) -> None:
    result = served(engine)["0 nodes"]
    metrics, steps = result.metrics, result.metrics[NODES % "count"]
    assert metrics[NODES % "sum"] == 0
    assert metrics["vllm:dyntree_fallback_steps_total{reason=empty_tree}"] == steps
    emitted = sum(len(output.tokens[0]) for output in result.outputs if output)
    assert steps == emitted - len(result.outputs)  # The first token of each is its prompt's.


def test_no_tree_is_drafted_where_no_request_wants_one(engine: str, served: Served) -> None:
    """The draft reads along, for requests that may come. Control: others draft."""
    none, some = (served(engine)[name].metrics for name in ("0 nodes", "4 nodes"))
    stage = "vllm:dyntree_stage_seconds_count{stage=draft}"
    forwards, steps = "vllm:dyntree_draft_forwards_total", NODES % "count"
    assert none[stage] == 0 < some[stage]
    assert none[forwards] / none[steps] <= some[forwards] / some[steps]
