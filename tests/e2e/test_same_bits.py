"""With `exactness` bits, no bit of an answer's tokens and logprobs depends on trees and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sabotage_of_bits
import workload
from engine_process import Result, Run, serve
from equal_bits import differing, without_nodes
from slow import marked

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

SCORES = {"logprobs": 20}
"""The logprobs of the best tokens show all bits of a row's logits, over which they are normed."""
REQUESTS = [
    *workload.each_kind(range(12), prompt_logprobs=0, **SCORES),
    *(workload.ask(n, "full", temperature=0.7, **SCORES) for n in range(12, 15)),
    *workload.each_kind(range(70, 73), repetition_penalty=1.3, **SCORES),
    *workload.each_kind(range(73, 76), presence_penalty=0.8, frequency_penalty=0.4, **SCORES),
    *workload.long_each_kind(range(140, 146), 300, **SCORES),
]
FEW = REQUESTS[10:]


PLAIN = Run(without_nodes(REQUESTS), batch=3)
TREES = {"trees": Run(REQUESTS)}
BITS: Any = {"exactness": "bits"}
ENGINES: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "tree": (
        workload.tree(**BITS),
        {
            "plain": PLAIN,
            "plain alone": Run(without_nodes(FEW), batch=1),
            "plain together": Run(without_nodes(FEW)),
            **TREES,
            "trees in batches of 5": Run(REQUESTS, batch=5),
            **{each.__name__: Run(FEW, sabotage=each.__name__) for each in sabotage_of_bits.BROKEN},
            "after the sabotage": Run(FEW),
        },
    ),
    "tight": (workload.tree(10, slots=16, **BITS) | workload.TIGHT, TREES),
    "adaptive look-up": (
        workload.without_draft(64, **BITS) | {"max_num_batched_tokens": 300},
        TREES,
    ),
    "head": (workload.with_head(pair.paths()["eagle3"], **BITS), TREES),
    "vLLM": (workload.without_tree(), {"its own": Run(REQUESTS)}),
    "compiled": (workload.tree(**BITS) | {"enforce_eager": False}, {"plain": PLAIN, **TREES}),
}
SLOW = {"head", "compiled"}
RUNS = [
    (engine, name)
    for engine, (_, runs) in ENGINES.items()
    for name, run in runs.items()
    if engine != "vLLM" and run.sabotage is None and name != "plain"
]
Served = Callable[[str, str], Mapping[str, Result]]


@pytest.fixture(scope="module")
def served() -> Served:
    """Return the results of an engine in a type; each starts once."""

    @functools.cache
    def results(engine: str, dtype: str) -> Mapping[str, Result]:
        arguments, runs = ENGINES[engine]
        return serve(arguments | {"dtype": dtype}, runs, threads=1)

    return results


@pytest.mark.parametrize(("engine", "name"), marked(RUNS, SLOW))
def test_bfloat16_answers_have_the_same_bits(engine: str, name: str, served: Served) -> None:
    # A compiled model rounds less often, and so is compared with itself.
    plain = served("compiled" if engine == "compiled" else "tree", "bfloat16")["plain"]
    result = served(engine, "bfloat16")[name]
    assert differing(ENGINES[engine][1][name], result, PLAIN, plain) == []
    drafted = "vllm:spec_decode_num_accepted_tokens_total"
    assert ("plain" in name) == (result.metrics[drafted] == 0)


@pytest.mark.slow
def test_float32_answers_have_the_same_bits_and_the_tokens_of_vllm(served: Served) -> None:
    results = served("tree", "float32")
    for name in ("trees", "trees in batches of 5", "plain alone"):
        run = ENGINES["tree"][1][name]
        assert differing(run, results[name], PLAIN, results["plain"]) == [], name
    (of_vllm,) = served("vLLM", "float32").values()
    tokens = [[each.tokens for each in run.outputs if each] for run in (of_vllm, results["plain"])]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("broken", [each.__name__ for each in sabotage_of_bits.BROKEN])
def test_a_broken_mechanism_changes_bits(broken: str, served: Served) -> None:
    results = served("tree", "bfloat16")
    assert differing(ENGINES["tree"][1][broken], results[broken], PLAIN, results["plain"])


def test_prompts_came_in_chunks_and_from_the_cache_and_requests_were_preempted(
    served: Served,
) -> None:
    again, tight = served("tree", "bfloat16")["trees"], served("tight", "bfloat16")["trees"]
    assert sum(output.cached > 200 for output in again.outputs if output) >= 6
    assert tight.metrics["vllm:num_preemptions_total"] > 0
    assert max(len(output.prompt) for output in tight.outputs if output) > 80
