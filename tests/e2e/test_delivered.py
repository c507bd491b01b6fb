"""Counters count what requests got, and trees are no larger than what requests still take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import workload
from comparison import Outputs, by_request, explain, mismatches
from engine_process import Result, Run, serve
from features import ask, each_kind

pytestmark = pytest.mark.e2e

STOPPED = [
    *each_kind(range(45, 57), stop=["\n", "self"]),
    *each_kind(range(57, 63), stop=["("], include_stop_str_in_output=True),
    *each_kind(range(60, 66), stop_token_ids=list(range(200, 300))),
    *each_kind(range(66, 72)),
]
CAPPED = [
    ask(number, "greedy", max_tokens=tokens, ignore_eos=True)
    for number, tokens in enumerate((3, 4, 5, 9, 17, 33, 64, 64))
]
RUNS = {
    "one": Run(each_kind(range(12), max_tokens=1)),
    "two": Run(each_kind(range(12), max_tokens=2, ignore_eos=True)),
    "three": Run(each_kind(range(12), max_tokens=3, ignore_eos=True)),
    "stopped": Run(STOPPED),
    "capped": Run(CAPPED),
    # The answers are of many lengths, so that some complete a block of 32 tokens at their end.
    "turns": Run([replace(request, turns=2) for request in each_kind(range(80, 112))], batch=8),
}
ENGINES: dict[str, dict[str, Any]] = {
    "adaptive": workload.with_options() | workload.STEADY,
    "fixed": workload.tree(),
}


@pytest.fixture(scope="module", params=ENGINES)
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    return serve(ENGINES[request.param], RUNS, threads=1)


@pytest.fixture(scope="module")
def alone() -> Outputs:
    run = Run([request for run in RUNS.values() for request in run.requests])
    return by_request(run, serve(workload.without_tree(), {"all": run}, threads=1)["all"])


def value(result: Result, name: str) -> float:
    return result.metrics[f"vllm:{name}"]


def returned(result: Result) -> int:
    return sum(len(output.tokens[0]) for output in result.outputs if output)


def test_the_tokens_are_those_without_trees(results: dict[str, Result], alone: Outputs) -> None:
    for name, run in RUNS.items():
        found = mismatches(run, results[name], alone)
        assert not found, explain(found)


@pytest.mark.parametrize("name", ["one", "two"])
def test_no_tree_is_grown_for_a_requests_last_token(name: str, results: dict[str, Result]) -> None:
    result = results[name]
    assert value(result, "dyntree_stage_seconds_count{stage=draft}") == 0
    assert value(result, "dyntree_tree_nodes_sum") == 0
    assert value(result, "dyntree_tree_nodes_count") == returned(result) - len(result.outputs)


@pytest.mark.parametrize("name", ["stopped", "capped"])
def test_every_returned_token_is_a_steps_accepted_or_one_more(
    name: str, results: dict[str, Result]
) -> None:
    """The prompt gives the first token of a request."""
    result = results[name]
    steps = value(result, "dyntree_tree_nodes_count")
    accepted = value(result, "dyntree_accepted_path_tokens_sum")
    assert value(result, "spec_decode_num_accepted_tokens_total") == accepted > 0
    assert len(result.outputs) + steps + accepted == returned(result)
    assert value(result, "generation_tokens_total") == returned(result)
    assert value(result, "request_generation_tokens_sum") == returned(result)


def test_trees_are_no_deeper_than_what_is_left(results: dict[str, Result]) -> None:
    """Of three tokens the prompt gives one, and a step another. Control: other trees are deeper."""
    assert value(results["three"], "dyntree_tree_nodes_sum") > 0
    assert value(results["three"], "dyntree_proposed_nodes_total{depth=2}") == 0
    assert value(results["capped"], "dyntree_proposed_nodes_total{depth=2}") > 0


def test_the_next_turn_finds_every_block_that_an_answer_completed(
    results: dict[str, Result],
) -> None:
    for output in results["turns"].outputs:
        assert output is not None
        # The answer's last token has no KV. vLLM computes one token of a prompt at least.
        known = len(output.prompt) - 1
        assert output.cached == known // 32 * 32
