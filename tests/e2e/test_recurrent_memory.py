"""Targets with recurrent layers where blocks are few and requests end early: the tokens are those
of the engine without trees, and a request holds one state in each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import workload
from comparison import Outputs, accepted_per_step, by_request, explain, mismatches
from engine_process import Request, Result, Run, serve
from features import PROMPTS, SEEDS, limited
from random_engines import FLOAT32_DELTA_NET
from random_targets import random_target
from state_blocks import Blocks, serve_noting

pytestmark = pytest.mark.e2e

NODES = 8
TIGHT = {"num_gpu_blocks_override": 40}
FEW = {"allowed_token_ids": [300, 301, 302]}
"""Of so few tokens look-up guesses many."""


def _request(number: int, **params: Any) -> Request:
    temperature = (0, 0.7, 1)[number % 3]
    seed = {"seed": SEEDS[number]} if temperature else {}
    asked = {"temperature": temperature, "max_tokens": 60} | FEW | seed | params
    return Request(PROMPTS[number], asked, keep=20)


REQUESTS = [_request(number) for number in range(24)]
STOPPED = [_request(number, stop_token_ids=[302], min_tokens=8) for number in range(24, 48)]
GROWING = [_request(number, max_tokens=400) for number in range(12)]


def _aborted(requests: int) -> Run:
    many = [_request(number % len(PROMPTS), max_tokens=200) for number in range(requests)]
    return Run(many, abort_after={number: 2 + number % 7 for number in range(requests)})


RUNS = {
    "preempted": Run(REQUESTS),
    "stopped": Run(STOPPED),
    "aborted": _aborted(200),
    "limited": limited(REQUESTS, 0, 3, None, 1),
}
OTHERS = {
    "falcon_h1": (REQUESTS, {}),
    "granitemoehybrid": (REQUESTS, {}),
    "qwen3_next": (GROWING, {"num_gpu_blocks_override": 30}),
}
"""Requests and arguments: Mamba-2 and attention in every layer, experts, preempted states of Gated
DeltaNet."""


def _common(model: str) -> dict[str, Any]:
    return {"model": model, "enable_prefix_caching": False}


def _with_trees(model: str) -> dict[str, Any]:
    return workload.without_draft(NODES, "ngram_gpu", budget="fixed") | _common(model)


Served = tuple[Outputs, Mapping[str, tuple[Result, Blocks]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made = tmp_path_factory.mktemp("targets")
    return cache(lambda kind: str(random_target(made / kind, kind)))


@pytest.fixture(scope="module")
def served(folder: Callable[[str], str]) -> Served:
    """Outputs without trees, and the runs of an engine with trees that has few blocks."""
    model = folder("nemotron_h")
    every = Run([*REQUESTS, *STOPPED, *RUNS["limited"].requests])
    plain = serve(workload.without_tree() | _common(model), {"all": every}, threads=1)
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
def test_after_a_thousand_aborted_requests_all_blocks_are_free(
    folder: Callable[[str], str],
) -> None:
    run = {"aborted": _aborted(1000)}
    ((result, blocks),) = serve_noting(_with_trees(folder("nemotron_h")) | TIGHT, run).values()
    assert not any(result.outputs)
    assert blocks.lost == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_no_token_differs_with_other_targets(kind: str, folder: Callable[[str], str]) -> None:
    model, (requests, options) = folder(kind), OTHERS[kind]
    run, in_float32 = {"all": Run(requests)}, FLOAT32_DELTA_NET if kind == "qwen3_next" else {}
    plain = serve(workload.without_tree() | _common(model) | in_float32, run, threads=1)["all"]
    result = serve(_with_trees(model) | options, run, threads=1)["all"]
    found = mismatches(run["all"], result, by_request(run["all"], plain))
    assert not found, explain(found)
    assert accepted_per_step(result) > 0.5
    assert (result.metrics["vllm:num_preemptions_total"] > 0) == (kind == "qwen3_next")
