"""Run some cases of `fuzz`, and check that it would find a wrong token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fuzz
import pytest
import workload
from fuzz import Plain, Tally, plain_engine
from fuzz_cases import Arrival, Schedule, schedule_of
from fuzz_options import KINDS, Options, engine_options, options_of_kind, plain_of_kind

pytestmark = pytest.mark.e2e

CASES = 20
"""Cases on each engine, of about four requests each."""


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    with plain_engine() as engine:
        yield engine


def _tight() -> Options:
    """Return an engine that preempts requests, and whose steps cut prompts and trees."""
    return Options(
        {
            **workload.with_options(16),
            **workload.STEADY,
            "max_model_len": fuzz.MAX_MODEL_LEN,
            "block_size": 32,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 60,
            "num_gpu_blocks_override": 14,
            "long_prefill_token_threshold": 40,
            "scheduling_policy": "priority",
        }
    )


def _roomy() -> Options:
    """Return an engine with whole trees, and prompts that share blocks."""
    trees = workload.tree(16)
    return Options({**trees, "max_model_len": fuzz.MAX_MODEL_LEN, "block_size": 32})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(_tight(), id="tight"),
        pytest.param(_roomy(), id="roomy", marks=pytest.mark.slow),
    ],
)
def test_random_requests_get_what_they_get_without_trees(
    options: Options, plain: Plain, tell: Callable[[str], None]
) -> None:
    tally = Tally()
    result = fuzz.fuzz(options, plain, CASES, 1, tally)
    assert not isinstance(result, tuple), fuzz.report(options, 1, *result)
    assert tally.cases == CASES
    assert result["vllm:spec_decode_num_accepted_tokens_total"] > 0
    if "num_gpu_blocks_override" in options.arguments:
        assert result["vllm:num_preemptions_total"] > 0
    tell(f"fuzzed: {tally}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nemotron_h", "gemma3_text", "deepseek_v2"])
def test_random_requests_on_targets_of_other_kinds(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind](tmp_path)
    options, tally = options_of_kind(6, model, kind), Tally()
    with plain_engine(**plain_of_kind(model, kind)) as plain:
        result = fuzz.fuzz(options, plain, CASES, 1, tally)
    assert not isinstance(result, tuple), fuzz.report(options, 1, *result)
    assert tally.cases == CASES
    assert result["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_an_engine_with_other_samples_is_found_and_its_case_can_be_asked_again(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paper's rule keeps the law of samples, but draws other tokens."""
    monkeypatch.setattr(fuzz, "SMALLER_SECONDS", 2)
    trees = workload.tree(growth="dyspec")
    options = Options({**trees, "max_model_len": fuzz.MAX_MODEL_LEN, "block_size": 32})
    result = fuzz.fuzz(options, plain, CASES, 1, Tally())
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
    schedule = Schedule([_arrival(), replace(_arrival(), follows=0, abort=3)], [2])
    assert schedule_of(json.loads(json.dumps(schedule.as_json()))) == schedule


def _arrival() -> Arrival:
    return Arrival(base=1, length=33, params={"max_tokens": 2}, tail=[7])
