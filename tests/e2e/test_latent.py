"""Targets with multi-head latent attention: the tokens are those of the engine without trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import workload
from comparison import accepted_per_step, by_request, mismatches
from engine_process import Request, Result, Run, serve
from features import PROMPTS, SEEDS
from latent_targets import CONFIGS, latent_target

pytestmark = pytest.mark.e2e

NODES = 8
BROKEN = ("without_kv_move", "wrong_ancestor_bit", "chain_positions", "without_rope_part")


def _request(number: int, **params: Any) -> Request:
    """One of three temperatures; prompts of one token, of a few, and long ones."""
    temperature = (0, 0.7, 1)[number % 3]
    seed = {"seed": SEEDS[number]} if temperature else {}
    keep = (1, 9, 30, None)[number % 4]
    text = PROMPTS[number] * (1 + number % 2)
    return Request(text, {"temperature": temperature, "max_tokens": 40} | seed | params, keep=keep)


REQUESTS = [
    # Random weights repeat nothing. Of so few tokens, look-up guesses many.
    *(_request(number, allowed_token_ids=[300, 301, 302]) for number in range(18)),
    *(_request(number, stop=["e", "ti"]) for number in range(18, 30)),
]
RUN = Run(REQUESTS)
ABORTED = Run(REQUESTS, abort_after={number: 2 + number % 5 for number in range(0, 30, 2)})

FEW_BLOCKS = {"num_gpu_blocks_override": 40}
"""Of 16 positions, which vLLM's kernel for CPUs asks for."""

Results = Mapping[str, Mapping[str, Result]]


def _served(kind: str, model: str) -> dict[str, Mapping[str, Result]]:
    """Return results by engine and run. The draft is the target itself."""
    target = {"model": model}
    twin = workload.tree(NODES, lookup="off") | target
    twin["speculative_config"] = {**twin["speculative_config"], "model": model}
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed")
    broken = {name: Run(REQUESTS, sabotage=name) for name in BROKEN}
    plain, sound = workload.without_tree() | target, {"sound": RUN}
    found = {
        "plain": serve(plain, sound, threads=1),
        "dense": serve(plain, sound, threads=1, VLLM_MLA_DISABLE="1"),
        "draft": serve(twin, sound | broken | {"again": RUN}, threads=1),
        "look-up": serve(
            look_up | target | FEW_BLOCKS, sound | {"aborted": ABORTED, "again": RUN}, threads=1
        ),
    }
    if CONFIGS[kind].get("num_nextn_predict_layers"):
        head = workload.with_head(model, "mtp", NODES, budget="fixed", lookup="off")
        found["module"] = serve(head, sound | {"again": RUN}, threads=1)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    folder = tmp_path_factory.mktemp("targets")
    return cache(lambda kind: _served(kind, str(latent_target(folder / kind, kind))))


def _differing(results: Results, engine: str, name: str) -> int:
    run = ABORTED if name == "aborted" else RUN
    return len(mismatches(run, results[engine][name], by_request(RUN, results["plain"]["sound"])))


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*product(CONFIGS, ("draft", "look-up")), ("deepseek_v3", "module")],
)
def test_no_token_differs(kind: str, engine: str, served: Callable[[str], Results]) -> None:
    results = served(kind)
    names = [name for name in results[engine] if name not in BROKEN]
    assert {name: _differing(results, engine, name) for name in names} == dict.fromkeys(names, 0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_twin_drafts_what_its_target_says(kind: str, served: Callable[[str], Results]) -> None:
    results = served(kind)
    assert accepted_per_step(results["draft"]["sound"]) > 3
    assert accepted_per_step(results["look-up"]["sound"]) > 0.5


@pytest.mark.parametrize("kind", CONFIGS)
def test_requests_are_preempted(kind: str, served: Callable[[str], Results]) -> None:
    assert served(kind)["look-up"]["sound"].metrics["vllm:num_preemptions_total"] > 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_keys_and_values_of_every_head_give_the_same_tokens(
    kind: str, served: Callable[[str], Results]
) -> None:
    """vLLM's other way to run these models reads no latent cache, and is an independent oracle."""
    results = served(kind)
    latent, dense = results["plain"]["sound"], results["dense"]["sound"]
    assert (latent.layout, dense.layout) == ("None", "vec16")
    assert _differing(results, "dense", "sound") == 0


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("broken", BROKEN)
def test_tokens_differ_if_attention_is_wrong(
    kind: str, broken: str, served: Callable[[str], Results]
) -> None:
    assert _differing(served(kind), "draft", broken) > 0
