"""All that a request can ask for, in one batch: the tokens are those without trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import adapters
import features
import pytest
import workload
from comparison import Outputs, by_request, explain, mismatches
from engine_process import Request, Result, Run, serve

pytestmark = pytest.mark.e2e

JSON = {
    "json": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
}
REGEX = {"regex": r"(ab|cd){3,9}[0-9]{2,5}!"}
CHOICE = {"choice": ["return self.name", "raise ValueError", "pass"]}
END_AT_ONCE = {str(workload.END): 25.0}

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"bad_words": ["self", " the", "return"]},
    {"structured_outputs": REGEX},
    {"structured_outputs": JSON},
    {"structured_outputs": CHOICE},
    {"thinking_token_budget": workload.THINKING_BUDGET},
    {"min_tokens": 12, "logit_bias": END_AT_ONCE},
    {"allowed_token_ids": list(range(60, 400))},
    {"top_k": 5, "min_p": 0.02, "logprobs": 2},
    {"extra_args": {"dyntree_nodes": 3}},
    {"structured_outputs": JSON, "repetition_penalty": 1.1, "min_tokens": 4},
    {"structured_outputs": REGEX, "bad_words": ["ab"], "logit_bias": {"17": 3.0}},
    {"repetition_penalty": 1.3, "top_p": 0.9, "thinking_token_budget": workload.THINKING_BUDGET},
    {"extra_args": {"dyntree_nodes": 0}, "frequency_penalty": 0.5},
    {},
)
"""Their number has no factor in common with that of the temperatures."""
TEMPERATURES = (0.0, 0.7, 1.0)


def _request(number: int) -> Request:
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    seed = {"seed": features.SEEDS[number]} if temperature else {}
    asked = ASKED[number % len(ASKED)]
    params = {"max_tokens": 32, "temperature": temperature, **seed, **asked}
    return Request(workload.PROMPTS[number], params)


RUN = Run([_request(number) for number in range(len(workload.PROMPTS))])
_TIGHT = {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24}
ENGINES: dict[str, dict[str, Any]] = {
    "adaptive": workload.with_options(),
    "tight": workload.tree(10, slots=16, width=3, max_depth=4, children=3) | _TIGHT,
}
SLOW: dict[str, dict[str, Any]] = {
    "fixed": workload.tree(),
    "64 nodes": workload.tree(64),
    "look-up": workload.without_draft(budget="fixed"),
    "head": workload.with_head(workload.pair.paths()["eagle3"], budget="fixed"),
    "tight head": workload.with_head(
        workload.pair.paths()["eagle3"], nodes=10, budget="fixed", width=3, max_depth=4
    )
    | _TIGHT,
    "expansion": workload.tree(growth="expansion", expansion=[2, 2, 1], sampling="best"),
}


@pytest.fixture(scope="module")
def without_trees() -> Outputs:
    return by_request(RUN, serve(workload.without_tree(), {"all": RUN}, threads=1)["all"])


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: serve(engine, {"all": RUN}, threads=1)["all"] for name, engine in ENGINES.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_tokens_are_those_without_trees(
    engine: str, results: dict[str, Result], without_trees: Outputs
) -> None:
    found = mismatches(RUN, results[engine], without_trees)
    assert not found, explain(found)


@pytest.mark.slow
@pytest.mark.parametrize("engine", SLOW)
def test_the_tokens_are_those_without_trees_whatever_grows_them(
    engine: str, without_trees: Outputs
) -> None:
    found = mismatches(RUN, serve(SLOW[engine], {"all": RUN}, threads=1)["all"], without_trees)
    assert not found, explain(found)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "most"), [("adaptive", 16), ("tight", 4), ("tight head", 7)])
def test_with_adapters_in_turn_they_are_those_without_trees(
    engine: str, most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """``most``: requests at a time. With adapters vLLM wants a step to hold all their trees."""
    folders = adapters.two_adapters(tmp_path_factory.mktemp("adapters"))
    run = replace(RUN, requests=features.adapters_in_turn(RUN.requests, folders))
    plain, trees = (
        serve(adapters.LORA | arguments | {"max_num_seqs": most}, {"all": run}, threads=1)["all"]
        for arguments in (workload.without_tree(), (ENGINES | SLOW)[engine])
    )
    found = mismatches(run, trees, by_request(run, plain))
    assert not found, explain(found)


def test_every_request_has_real_trees(results: dict[str, Result]) -> None:
    """No step is a chain because of what a request asks for."""
    for result in results.values():
        reasons = {
            name: steps
            for name, steps in result.metrics.items()
            if name.startswith("vllm:dyntree_fallback_steps_total") and steps
        }
        assert reasons.keys() <= {"vllm:dyntree_fallback_steps_total{reason=empty_tree}"}
        assert result.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_a_tiny_cache_preempts_some_of_them(results: dict[str, Result]) -> None:
    assert results["tight"].metrics["vllm:num_preemptions_total"] > 0
