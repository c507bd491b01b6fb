"""Whatever vLLM schedules: the same tokens and logprobs as without trees. These are schedules that
have names, and some of `fuzz`'s random ones, which would find a wrong token.

Prompts of every length, of which a part may lie in the prefix cache. vLLM fills a request up with
drafts that has one token left to compute: a copy of a prompt whose other tokens fill blocks, a
request that is resumed, a prompt of one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import fuzz
import pytest
import workload
from fuzz import Plain, Tally, differences, plain_engine
from fuzz_cases import BASES, MAX_MODEL_LEN, Arrival, Schedule, schedule_of
from fuzz_engine import Answer, EngineProcess
from fuzz_options import KINDS, Options, engine_options, options_of_kind, plain_of_kind
from slow import marked

pytestmark = pytest.mark.e2e

BLOCK = 32
LENGTHS = range(1, 3 * BLOCK + 3)
ONE_TOKEN_LEFT = (1, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 1)
WHEN_IDLE = 1 << 30
"""A step that never comes: such requests arrive one by one, whenever the engine is idle."""


def ask(length: int, copy: int = 0, *, at: int = 0, priority: int = 0, **params: Any) -> Arrival:
    kind = list(workload.KINDS)[(length + copy) % len(workload.KINDS)]
    seed = {} if kind == "greedy" else {"seed": length}
    given = {"max_tokens": 6, "logprobs": 2} | workload.KINDS[kind] | seed | params
    return Arrival(length % BASES, length, given, at=at, priority=priority)


RESUMED = [ask(length, max_tokens=40, ignore_eos=True) for length in range(20, 84, 4)]
FEW = {
    "copies": Schedule([ask(length, copy) for length in ONE_TOKEN_LEFT for copy in range(4)]),
    "several": Schedule([ask(n, temperature=0.9, seed=n, n=3) for n in ONE_TOKEN_LEFT]),
    "resumed": Schedule(RESUMED, resumed=True),
    # Prompts of one token take slots of longer ones while another request decodes.
    "scored": Schedule(
        [
            ask(40, max_tokens=80, ignore_eos=True),
            *(ask(40, copy) for copy in range(1, 4)),
            *(ask(1, copy, at=15 + copy, prompt_logprobs=1) for copy in range(4)),
        ]
    ),
}
"""The first of an engine's schedules meets slots that never held a tree."""
ALL = FEW | {
    "parameters that read paths": Schedule(
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
    ),
    "every length": Schedule([ask(length) for length in LENGTHS]),
    "one by one": Schedule(
        [ask(n, at=WHEN_IDLE) for n in LENGTHS if (n + 1) % BLOCK < 4 for _ in range(2)]
    ),
}
# In chunks the prompts would take longer to read again than until they are forgotten.
FORGOTTEN = {"forgotten": Schedule(RESUMED, resets=[*range(4, 400, 5)])}
URGENT = {
    "urgent": Schedule(
        [ask(60, n, priority=-n, max_tokens=100, ignore_eos=True, seed=n) for n in range(24)]
    )
}
"""Every request is more urgent than those before it, and preempts them."""

SIZES = {"max_model_len": MAX_MODEL_LEN, "block_size": BLOCK}
CHUNKED = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
SCARCE = {
    "max_num_batched_tokens": 80,
    "num_gpu_blocks_override": 24,
    "scheduling_policy": "priority",
}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Schedule]]] = {
    "fixed": (workload.tree(), ALL | FORGOTTEN),
    "scarce": (workload.tree(10, slots=16) | SCARCE, URGENT),
    "adaptive": (workload.with_options(), ALL | FORGOTTEN),
    "chunked": (workload.tree() | CHUNKED, ALL),
    **{
        growth: (workload.tree(growth=growth, rule="match", **own), FEW)
        for growth, own in workload.GROWTHS.items()
    },
}
RUNS = [(engine, name) for engine, (_, named) in ENGINES.items() for name in named]
SLOW_ENGINES = ENGINES.keys() - {"fixed", "scarce"}
BROKEN = "copies as trees"


@dataclass(frozen=True)
class Scheduled:
    """The answers to a schedule, how many requests were filled up, and what metrics gained."""

    answers: list[Answer]
    filled_up: int
    metrics: Mapping[str, float]


Served = Callable[[str], Mapping[str, Scheduled]]
Answers = Callable[[Schedule], list[Answer]]


@pytest.fixture(scope="module")
def served() -> Served:
    @cache
    def results(name: str) -> dict[str, Scheduled]:
        arguments, schedules = ENGINES[name]
        engine, found = EngineProcess(arguments | SIZES), {}
        runs = [(each, schedule, None) for each, schedule in schedules.items()]
        if name == "fixed":
            runs.append((BROKEN, schedules["copies"], "padding_as_tree"))
        before: Mapping[str, float] = {}
        for each, schedule, sabotage in runs:
            answers, after = engine.answers(schedule, sabotage), engine.metrics()
            gained = {metric: value - before.get(metric, 0) for metric, value in after.items()}
            found[each] = Scheduled(answers, engine.filled_up, gained)
            before = after
        engine.close()
        return found

    return results


@pytest.fixture(scope="module")
def reference() -> Iterator[Plain]:
    with plain_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(reference: Plain) -> Answers:
    """Return a function that gives the answers of the engine without trees."""
    known: dict[str, list[Answer]] = {}

    def answers(schedule: Schedule) -> list[Answer]:
        asked = str(schedule.arrivals)
        if asked not in known:
            known[asked] = reference.answers(schedule)
        return known[asked]

    return answers


@pytest.mark.parametrize(("engine", "name"), marked(RUNS, SLOW_ENGINES))
def test_tokens_and_logprobs_are_those_without_trees(
    engine: str, name: str, served: Served, plain: Answers
) -> None:
    schedule = ENGINES[engine][1][name]
    assert not differences(schedule, served(engine)[name].answers, plain(schedule))


@pytest.mark.parametrize("engine", marked([e for e in ENGINES if e != "scarce"], SLOW_ENGINES))
def test_requests_were_filled_up(engine: str, served: Served) -> None:
    results = served(engine)
    assert results["copies"].filled_up
    assert results["scored"].filled_up
    # In steps of so few tokens others are in their prompts, and none is filled up.
    assert results["resumed"].filled_up or engine == "chunked"


def test_rows_that_fill_a_request_up_change_tokens_if_they_are_taken_for_a_tree(
    served: Served, plain: Answers
) -> None:
    found, schedule = served("fixed")[BROKEN], FEW["copies"]
    assert found.filled_up
    assert differences(schedule, found.answers, plain(schedule))


def test_rows_that_fill_a_request_up_are_not_counted_as_a_tree(served: Served) -> None:
    result = served("fixed")["copies"]
    metrics = result.metrics
    alone = sum(value for name, value in metrics.items() if "fallback_steps" in name)
    drafts, accepted = (
        metrics[f"vllm:spec_decode_num_{what}_total"] for what in ("drafts", "accepted_tokens")
    )
    # Every step of a request gives a token, and a prompt gives its first one.
    requests = len(result.answers)
    assert metrics["vllm:generation_tokens_total"] == requests + drafts + accepted + alone


@pytest.mark.parametrize(("engine", "name"), [("scarce", "urgent"), ("fixed", "forgotten")])
def test_requests_are_preempted_while_their_trees_wait(
    engine: str, name: str, served: Served
) -> None:
    metrics = served(engine)[name].metrics
    assert metrics["vllm:num_preemptions_total"] > len(RESUMED) // 2
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


CASES = 20
"""Cases on each engine, of about four requests each."""


TIGHT = {
    **workload.STEADY,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 60,
    "num_gpu_blocks_override": 14,
    "long_prefill_token_threshold": 40,
    "scheduling_policy": "priority",
}
"""Such an engine preempts requests, and its steps cut prompts and trees."""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(workload.with_options() | TIGHT, id="tight"),
        pytest.param(workload.tree(), id="roomy", marks=pytest.mark.slow),
    ],
)
def test_random_requests_get_what_they_get_without_trees(
    arguments: dict[str, Any], reference: Plain, tell: Callable[[str], None]
) -> None:
    options, tally = Options(arguments | SIZES), Tally()
    result = fuzz.fuzz(options, reference, CASES, 1, tally)
    assert not isinstance(result, tuple), fuzz.report(options, 1, *result)
    assert tally.cases == CASES
    assert result["vllm:spec_decode_num_accepted_tokens_total"] > 0
    if "num_gpu_blocks_override" in options.arguments:
        assert result["vllm:num_preemptions_total"] > 0
    tell(f"fuzzed: {tally}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nemotron_h", "gemma3_text", "qwen3_next", "deepseek_v2"])
def test_random_requests_on_targets_of_other_kinds(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind](tmp_path)
    options, tally = options_of_kind(6, model, kind), Tally()
    with plain_engine(**plain_of_kind(model, kind)) as plain:
        result = fuzz.fuzz(options, plain, CASES, 1, tally)
    assert not isinstance(result, tuple), fuzz.report(options, 1, *result)
    assert tally.cases == CASES
    assert result["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_an_engine_with_other_samples_is_found_and_its_case_can_be_asked_again(
    reference: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paper's rule keeps the law of samples, but draws other tokens."""
    monkeypatch.setattr(fuzz, "SMALLER_SECONDS", 2)
    options = Options(workload.tree(growth="dyspec") | SIZES)
    result = fuzz.fuzz(options, reference, CASES, 1, Tally())
    assert isinstance(result, tuple)
    schedule, found = result
    told = json.loads(fuzz.report(options, 1, schedule, found))
    assert schedule_of(told) == schedule
    assert told["engine"] == dict(options.arguments)
    assert "sequence" in found


def test_options_of_a_number_are_always_the_same() -> None:
    assert engine_options(5) == engine_options(5)
    assert len({json.dumps(engine_options(n).arguments) for n in range(20)}) == 20


def test_a_schedule_is_the_same_behind_json() -> None:
    arrival = Arrival(base=1, length=33, params={"max_tokens": 2}, tail=[7])
    schedule = Schedule([arrival, replace(arrival, follows=0, abort=3)], [2])
    assert schedule_of(json.loads(json.dumps(schedule.as_json()))) == schedule
