"""Tokens stay the same if the scheduler chooses before it sees a tree, whatever it chooses."""

from __future__ import annotations

from collections import Counter

import pytest
import workload
from asynchronous import Chosen, serve_asynchronously
from comparison import Outputs, explain, mismatches
from engine_process import Run

from dyntree_plugin.tree.budget.choice import node_buckets

pytestmark = pytest.mark.e2e

REQUESTS = workload.each_kind(range(24))
OTHERS = workload.EVERYTHING[::5]
RUNS = {
    "every_choice": Run([*REQUESTS, *OTHERS], sabotage="every_choice", batch=6),
    "its own": Run(REQUESTS, batch=4),
}
LIMITED = {name: workload.LIMITED[name] for name in ("mixed limits", "0 nodes")}
FORWARDS = 15


@pytest.fixture(scope="module")
def chosen() -> dict[str, Chosen]:
    return serve_asynchronously(workload.with_options(), RUNS | LIMITED)


@pytest.fixture(scope="module")
def looked_up() -> dict[str, Chosen]:
    return serve_asynchronously(workload.without_draft(method="ngram_gpu"), RUNS)


@pytest.mark.parametrize("engine", ["chosen", pytest.param("looked_up", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_the_tokens_are_those_without_trees(
    engine: str, name: str, request: pytest.FixtureRequest, plain: Outputs
) -> None:
    served: dict[str, Chosen] = request.getfixturevalue(engine)
    found = mismatches(RUNS[name], served[name].result, plain)
    assert not found, explain(found)


@pytest.mark.slow
def test_look_up_alone_finds_what_the_device_alone_knows_so_far(
    looked_up: dict[str, Chosen],
) -> None:
    forwards, nodes = map(set, zip(*looked_up["every_choice"].choices, strict=True))
    assert (forwards, nodes) == ({0}, {*node_buckets(16)})
    accepted = looked_up["its own"].result.metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 0


def test_every_number_of_forwards_and_nodes_was_chosen(chosen: dict[str, Chosen]) -> None:
    forwards, nodes = map(set, zip(*chosen["every_choice"].choices, strict=True))
    assert forwards == {*range(1 + FORWARDS)}
    assert nodes == {*node_buckets(16)}


def test_forwards_are_those_that_were_chosen(chosen: dict[str, Chosen]) -> None:
    """A step without a tree runs the catch-up forward alone."""
    metrics, choices = chosen["every_choice"].result.metrics, chosen["every_choice"].choices
    most = sum(1 + (forwards if nodes else 0) for forwards, nodes in choices)
    made = metrics["vllm:dyntree_draft_forwards_total"]
    # A forward without nodes is left out, such as one below the depth that a request has a use for,
    # and the last step's forwards are not counted.
    assert 0.6 * most < made <= most


def test_a_draft_that_costs_as_much_as_its_target_is_not_run_to_the_end(
    chosen: dict[str, Chosen],
) -> None:
    choices = chosen["its own"].choices
    (usual, _), *_ = Counter(choices[len(choices) // 2 :]).most_common(1)
    assert usual[0] < FORWARDS


@pytest.mark.parametrize("name", LIMITED)
def test_limits_of_requests_are_kept(name: str, chosen: dict[str, Chosen], plain: Outputs) -> None:
    """Whether no request wants nodes is known before the trees are drafted."""
    result = chosen[name].result
    found = mismatches(LIMITED[name], result, plain)
    assert not found, explain(found)
    nodes = result.metrics["vllm:dyntree_tree_nodes_sum"]
    drafted = result.metrics["vllm:dyntree_stage_seconds_count{stage=draft}"]
    assert (nodes > 0, drafted > 0) == ((name == "mixed limits",) * 2)
