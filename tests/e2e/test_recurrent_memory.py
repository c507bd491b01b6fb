"""Targets with recurrent layers where blocks are few and requests end early: the tokens are those
of the engine without trees, and a request holds one state in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import Outputs, accepted_per_step, by_request, explain, mismatches
from engine_process import Request, Result, Run, serve
from features import PROMPTS, SEEDS, limited
from random_engines import FEW, FLOAT32_DELTA_NET, NODES
from random_targets import random_target
from references import serve_right
from state_blocks import Blocks, serve_noting

pytestmark = pytest.mark.e2e

TIGHT = {"num_gpu_blocks_override": 40}


def _request(number: int, **params: Any) -> Request:
    temperature = (0, 0.7, 1)[number % 3]
    seed = {"seed": SEEDS[number]} if temperature else {}
    asked = {"temperature": temperature, "max_tokens": 60} | FEW | seed | params
    return Request(PROMPTS[number], asked, keep=20)


REQUESTS = [_request(number) for number in range(24)]
STOPPED = [_request(number, stop_token_ids=[302], min_tokens=8) for number in range(24, 48)]


RUNS = {
    "preempted": Run(REQUESTS),
    "stopped": Run(STOPPED),
    "aborted": Run(
        [_request(number, max_tokens=200) for number in range(len(PROMPTS))],
        abort_after={number: 2 + number % 7 for number in range(len(PROMPTS))},
    ),
    "limited": limited(REQUESTS, 0, 3, None, 1),
}


def _common(model: str) -> dict[str, Any]:
    return {"model": model, "enable_prefix_caching": False}


def _with_trees(model: str) -> dict[str, Any]:
    return workload.without_draft(NODES, "ngram_gpu", budget="fixed") | _common(model)


Served = tuple[Outputs, Mapping[str, tuple[Result, Blocks]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Outputs without trees, and the runs of an engine with trees that has few blocks."""
    model = str(random_target(tmp_path_factory.mktemp("targets") / "target", "nemotron_h"))
    every = Run([*REQUESTS, *STOPPED, *RUNS["limited"].requests])
    plain = serve_right(workload.without_tree() | _common(model), {"all": every})
    return by_request(every, plain["all"]), serve_noting(_with_trees(model) | TIGHT, RUNS)


@pytest.mark.parametrize("name", ["preempted", "stopped", "limited"])
def test_no_token_differs(name: str, served: Served) -> None:
    plain, results = served
    result, _ = results[name]
    found = mismatches(RUNS[name], result, plain)
    assert not found, explain(found)
    assert accepted_per_step(result) > (0 if name == "limited" else 0.5)
    assert name != "preempted" or result.metrics["vllm:num_preemptions_total"] > 0
    lengths = {len(output.tokens[0]) for output in result.outputs if output}
    assert (len(lengths) > 5) == (name == "stopped")


@pytest.mark.parametrize("name", RUNS)
def test_a_request_holds_one_state_in_each_layer_and_gives_everything_back(
    name: str, served: Served
) -> None:
    _, blocks = served[1][name]
    assert blocks.states == [1]
    assert blocks.attention <= 1
    assert blocks.lost == 0


def test_all_requests_were_aborted_within_their_answers(served: Served) -> None:
    assert not any(served[1]["aborted"][0].outputs)


@pytest.mark.slow
def test_states_of_gated_delta_net_are_preempted(tmp_path: Path) -> None:
    model = str(random_target(tmp_path / "target", "qwen3_next"))
    run = {"all": Run([_request(number, max_tokens=400) for number in range(12)])}
    plain = serve_right(workload.without_tree() | _common(model) | FLOAT32_DELTA_NET, run)["all"]
    result = serve(_with_trees(model) | {"num_gpu_blocks_override": 30}, run, threads=1)["all"]
    found = mismatches(run["all"], result, by_request(run["all"], plain))
    assert not found, explain(found)
    assert accepted_per_step(result) > 0.5
    assert result.metrics["vllm:num_preemptions_total"] > 0
