"""Drafts know the requests' parameters: more of a tree is accepted, and output stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import workload
from comparison import accepted_per_step, by_request, explain, mismatches
from engine_process import Request, Result, Run, serve
from workload import ask, each_kind

pytestmark = pytest.mark.e2e

GAINS: dict[str, tuple[dict[str, Any], float]] = {
    "top_k": ({"top_k": 3}, 1.15),
    "allowed_token_ids": ({"allowed_token_ids": list(range(60, 400))}, 1.25),
    "repetition_penalty": ({"repetition_penalty": 1.3}, 1.04),
    "logit_bias": ({"logit_bias": {"5": 4.0, "300": 3.5, "17": -50.0}}, 1.04),
}
"""Parameters, and how many times the tokens per step they must gain. Measured: 1.33, 1.46, 1.12
and 1.10."""

WARM = Run([ask(number, "full") for number in range(32)])
GAINED = {
    name: Run([ask(number, "full", **params) for number in range(32)])
    for name, (params, _) in GAINS.items()
}

PARAMETERS = ("top_k", "min_p", "logit_bias", "min_tokens", "allowed_token_ids", "long lists")
READING_PATHS = ("penalties", "bad_words", "thinking_budget")


def _some(names: tuple[str, ...], most: int) -> list[Request]:
    return [request for name in names for request in workload.FEATURES[name][:most]]


SAMPLE = Run([*_some(PARAMETERS, 3), *_some(READING_PATHS, 4), *each_kind(range(90, 96))])

OF_TWIN = {
    "parameters": Run([*_some(PARAMETERS, 6), *each_kind(range(12))]),
    "parameters that read paths": Run(_some(READING_PATHS, 6)),
}

RUNS = {
    "warm": WARM,
    **{f"{name} {how}": Run(run.requests, sabotage=sabotage)
       for name, run in GAINED.items()
       for how, sabotage in (("off", "unranked"), ("on", None))},
    "sample": SAMPLE,
    "captured": Run(SAMPLE.requests, sabotage="captured"),
}  # fmt: skip
TWIN = {
    **OF_TWIN,
    **{f"{name} off": Run(run.requests, sabotage="unranked") for name, run in OF_TWIN.items()},
}
PLAIN = Run([*SAMPLE.requests, *(r for run in GAINED.values() for r in run.requests)])


@pytest.fixture(scope="module")
def trees() -> dict[str, Result]:
    return serve(workload.tree(), RUNS, threads=1)


@pytest.fixture(scope="module")
def twin() -> dict[str, Result]:
    return serve(workload.ENGINES["twin"][0], TWIN, threads=1)


@pytest.fixture(scope="module")
def plain() -> Result:
    return serve(workload.without_tree(), {"plain": PLAIN}, threads=1)["plain"]


@pytest.mark.parametrize("name", GAINS)
def test_a_draft_that_knows_the_parameters_gains_tokens_per_step(
    name: str, trees: dict[str, Result], tell: Callable[[str], None]
) -> None:
    """The same requests with the same seeds, once with the draft's own ranking."""
    off, on = (1 + accepted_per_step(trees[f"{name} {how}"]) for how in ("off", "on"))
    tell(f"tokens per step at temperature 1 with {name}: {off:.2f} without ranking, {on:.2f} with")
    assert on >= GAINS[name][1] * off


@pytest.mark.parametrize("name", [name for name in RUNS if name != "warm"])
def test_tokens_are_those_without_trees(name: str, trees: dict[str, Result], plain: Result) -> None:
    run = RUNS[name]
    found = mismatches(run, trees[name], by_request(PLAIN, plain))
    assert not found, explain(found)


def _reached(result: Result) -> float:
    """Return the accepted part of the trees' depths."""
    reached = result.metrics["vllm:dyntree_accepted_path_tokens_sum"]
    return reached / result.metrics["vllm:dyntree_tree_depth_sum"]


@pytest.mark.parametrize("name", OF_TWIN)
def test_a_draft_that_is_the_target_is_accepted_to_the_last_level(
    name: str, twin: dict[str, Result], tell: Callable[[str], None]
) -> None:
    """Wrong parameters, slots, positions or paths would lower acceptance.

    Control: it is lower if the draft does not know the parameters.
    """
    on, off = _reached(twin[name]), _reached(twin[f"{name} off"])
    tell(f"{name}: {on:.3f} of a twin's depth is accepted, {off:.3f} without ranking")
    assert twin[name].metrics["vllm:dyntree_tree_depth_sum"] > 100
    assert on >= 0.99
    assert off < 0.97
