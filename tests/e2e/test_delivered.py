"""Counters count what requests got, and trees are no larger than what requests still take.

`test_identity` has the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from engine_process import Result

pytestmark = pytest.mark.e2e

Results = Mapping[str, Result]


@pytest.fixture(params=["tree", "fixed"])
def results(request: pytest.FixtureRequest, served: Callable[[str], Results]) -> Results:
    return served(request.param)


def value(result: Result, name: str) -> float:
    return result.metrics[f"vllm:{name}"]


def returned(result: Result) -> int:
    return sum(len(output.tokens[0]) for output in result.outputs if output)


@pytest.mark.parametrize("name", ["one", "two"])
def test_no_tree_is_grown_for_a_requests_last_token(name: str, results: Results) -> None:
    result = results[name]
    assert value(result, "dyntree_stage_seconds_count{stage=draft}") == 0
    assert value(result, "dyntree_tree_nodes_sum") == 0
    assert value(result, "dyntree_tree_nodes_count") == returned(result) - len(result.outputs)


@pytest.mark.parametrize("name", ["stopped", "capped", "max_model_len", "batches of 4"])
def test_every_returned_token_is_a_steps_accepted_or_one_more(name: str, results: Results) -> None:
    """The prompt gives the first token of a request."""
    result = results[name]
    steps = value(result, "dyntree_tree_nodes_count")
    accepted = value(result, "dyntree_accepted_path_tokens_sum")
    assert value(result, "spec_decode_num_accepted_tokens_total") == accepted > 0
    assert len(result.outputs) + steps + accepted == returned(result)
    assert value(result, "generation_tokens_total") == returned(result)
    assert value(result, "request_generation_tokens_sum") == returned(result)


def test_trees_are_no_deeper_than_what_is_left(results: Results) -> None:
    """Of three tokens the prompt gives one, and a step another. Control: other trees are deeper."""
    assert value(results["three"], "dyntree_tree_nodes_sum") > 0
    assert value(results["three"], "dyntree_proposed_nodes_total{depth=2}") == 0
    assert value(results["capped"], "dyntree_proposed_nodes_total{depth=2}") > 0


def test_the_next_turn_finds_every_block_that_an_answer_completed(results: Results) -> None:
    for output in results["turns"].outputs:
        assert output is not None
        # The answer's last token has no KV. vLLM computes one token of a prompt at least.
        known = len(output.prompt) - 1
        assert output.cached == known // 32 * 32
