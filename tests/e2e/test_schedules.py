"""Whatever vLLM schedules: the same tokens and logprobs as without trees.

Prompts of every length, of which a part may lie in the prefix cache. vLLM fills a request up with
drafts that has one token left to compute: a copy of a prompt whose other tokens fill blocks, a
request that is resumed, a prompt of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import workload
from comparison import Outputs, by_request, explain, mismatches
from engine_process import Request, Run, serve
from schedules import Scheduled, serve_watched
from slow import marked

pytestmark = pytest.mark.e2e

BLOCK = 32
LENGTHS = range(1, 3 * BLOCK + 3)
ONE_TOKEN_LEFT = (1, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 1)


def ask(length: int, copy: int = 0, **params: object) -> Request:
    kind = list(workload.KINDS)[(length + copy) % len(workload.KINDS)]
    return workload.long(length, kind, length, **{"max_tokens": 6, "logprobs": 2} | params)


COPIES = Run([ask(length, copy) for length in ONE_TOKEN_LEFT for copy in range(4)])
SEVERAL = Run([ask(length, temperature=0.9, seed=length, n=3) for length in ONE_TOKEN_LEFT])
RESUMED = Run(
    [ask(length, max_tokens=40, ignore_eos=True) for length in range(20, 84, 4)], sabotage="resumed"
)
CHAINS = Run(
    [
        ask(length, **params)
        for length in ONE_TOKEN_LEFT
        for params in (
            {"repetition_penalty": 1.3},
            {"bad_words": ["self", " the"]},
            {"thinking_token_budget": workload.THINKING_BUDGET},
            {"structured_outputs": {"regex": r"(ab|cd){3,9}!"}},
        )
        for _ in range(2)
    ]
)
FEW = {"copies": COPIES, "several": SEVERAL, "resumed": RESUMED}
"""The first of an engine's runs meets slots that never held a tree."""
ALL = FEW | {
    "chains": CHAINS,
    "every length": Run([ask(length) for length in LENGTHS]),
    "one by one": Run([ask(n) for n in LENGTHS if (n + 1) % BLOCK < 4 for _ in range(2)], batch=1),
}
# In chunks the prompts would take longer to read again than until they are forgotten.
FORGOTTEN = {"forgotten": Run(RESUMED.requests, sabotage="forgotten")}
BROKEN = {"padding_as_tree": Run(COPIES.requests, sabotage="padding_as_tree")}
URGENT = {"urgent": Run(workload.DEMANDING, sabotage="urgent")}

CHUNKED = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
SCARCE = {
    "max_num_batched_tokens": 80,
    "num_gpu_blocks_override": 24,
    "scheduling_policy": "priority",
}
PROCESSES = (
    {
        "fixed": (workload.tree(), ALL | FORGOTTEN | BROKEN),
        "scarce": (workload.tree(10, slots=16) | SCARCE, URGENT),
    },
    {
        "adaptive": (workload.with_options(), ALL | FORGOTTEN),
        "chunked": (workload.tree() | CHUNKED, ALL),
    },
    {
        "dyspec": (workload.tree(growth="dyspec", rule="match"), FEW),
        "chain": (workload.tree(growth="chain"), FEW),
        "threshold": (workload.tree(growth="threshold", rule="match"), FEW),
        "expansion": (workload.tree(growth="expansion", expansion=[2, 2, 1], rule="match"), FEW),
        "sequoia": (workload.tree(growth="sequoia", acceptance=[0.6, 0.2], rule="match"), FEW),
    },
)
ENGINES = {name: engine for process in PROCESSES for name, engine in process.items()}
RUNS = [(engine, name) for engine, (_, runs) in ENGINES.items() for name in runs]
SLOW_ENGINES = {*PROCESSES[1], *PROCESSES[2]}

Served = Callable[[str], Mapping[str, Scheduled]]


@pytest.fixture(scope="module")
def served() -> Served:
    @cache
    def process(number: int) -> dict[str, dict[str, Scheduled]]:
        return serve_watched(
            {
                name: (arguments | {"block_size": BLOCK}, runs)
                for name, (arguments, runs) in PROCESSES[number].items()
            }
        )

    numbers = {name: number for number, engines in enumerate(PROCESSES) for name in engines}
    return lambda engine: process(numbers[engine])[engine]


@pytest.fixture(scope="module")
def plain() -> Outputs:
    every = (run.requests for _, runs in ENGINES.values() for run in runs.values())
    run = Run(list({request.key: request for requests in every for request in requests}.values()))
    return by_request(run, serve(workload.without_tree(), {"all": run}, threads=1)["all"])


@pytest.mark.parametrize(
    ("engine", "name"), marked([(e, n) for e, n in RUNS if n not in BROKEN], SLOW_ENGINES)
)
def test_tokens_and_logprobs_are_those_without_trees(
    engine: str, name: str, served: Served, plain: Outputs
) -> None:
    run, result = ENGINES[engine][1][name], served(engine)[name].result
    found = mismatches(run, result, plain)
    assert not found, explain(found)
    for key, output in by_request(run, result).items():
        for got, wanted in zip(output.logprobs, plain[key].logprobs, strict=True):
            assert len(got) == len(wanted)
            for token, wanted_token in zip(got, wanted, strict=True):
                assert token == pytest.approx(wanted_token, abs=1e-4)


@pytest.mark.parametrize("engine", marked([e for e in ENGINES if e != "scarce"], SLOW_ENGINES))
def test_requests_were_filled_up(engine: str, served: Served) -> None:
    results = served(engine)
    assert results["copies"].filled_up
    # In steps of so few tokens others are in their prompts, and none is filled up.
    assert results["resumed"].filled_up or engine == "chunked"


def test_rows_that_fill_a_request_up_change_tokens_if_they_are_taken_for_a_tree(
    served: Served, plain: Outputs
) -> None:
    found = served("fixed")["padding_as_tree"]
    assert found.filled_up
    assert mismatches(BROKEN["padding_as_tree"], found.result, plain)


COUNTED = ("drafts", "accepted_tokens")


def test_rows_that_fill_a_request_up_are_not_counted_as_a_tree(served: Served) -> None:
    result = served("fixed")["copies"].result
    metrics = result.metrics
    alone = sum(value for name, value in metrics.items() if "fallback_steps" in name)
    trees, accepted = (metrics[f"vllm:spec_decode_num_{what}_total"] for what in COUNTED)
    # Every step of a request gives a token, and a prompt gives its first one.
    sequences = sum(len(output.tokens) for output in result.outputs if output is not None)
    assert metrics["vllm:generation_tokens_total"] == sequences + trees + accepted + alone


@pytest.mark.parametrize(("engine", "name"), [("scarce", "urgent"), ("fixed", "forgotten")])
def test_requests_are_preempted_while_their_trees_wait(
    engine: str, name: str, served: Served
) -> None:
    metrics = served(engine)[name].result.metrics
    assert metrics["vllm:num_preemptions_total"] > len(RESUMED.requests) // 2
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
