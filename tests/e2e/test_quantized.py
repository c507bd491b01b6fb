"""Quantised weights: trees give the target's tokens, but for ties in bf16.

Each format is that of the usual tools; the engine without trees has the same quantised target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import workload
from comparison import accepted_per_step, by_request
from device_identity import VOCABULARY, noise
from engine_process import Result, Run, serve
from margins import MARGINS, Verdict, places, scores_of, scoring, verdict
from quantized_models import FORMATS, quantized

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN = Run(workload.each_kind(range(36)))
BROKEN = replace(RUN, sabotage="wrong_child")
NO_KERNEL = (
    "Failed to find a kernel",
    "'_C' object has no attribute",
    "_C::static_scaled_fp8_quant() expected at most 0",
)
"""What vLLM says if the processor or the build has no kernel for a form."""
TOO_SLOW = "compressed fp8"
"""A CPU makes these products in plain torch, which takes minutes for an engine."""
NAMES = [name for name in FORMATS if name != TOO_SLOW]
WITHOUT = "the target alone"


@dataclass(frozen=True)
class Compared:
    """Verdicts by run, and the engine's results."""

    verdicts: dict[str, Verdict]
    trees: dict[str, Result]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compared]:
    """Return a function that compares engines of a quantised pair with and without trees."""

    @cache
    def compare(form: str) -> Compared:
        folder = tmp_path_factory.mktemp("quantized")
        models = {name: str(quantized(folder / name, name, form)) for name in ("target", "draft")}
        return _compare(models)

    return compare


def _compare(models: dict[str, str]) -> Compared:
    plain = workload.without_tree() | {"model": models["target"], "dtype": "bfloat16"}
    trees = workload.tree() | {"model": models["target"], "dtype": "bfloat16"}
    trees["speculative_config"] |= {"model": models["draft"]}
    own = _served(trees, {"sound": RUN, "broken": BROKEN})
    alone = _served(plain | {"max_logprobs": -1}, {WITHOUT: RUN})[WITHOUT]
    wanted = by_request(RUN, alone)
    found = {name: places(RUN, own[name], wanted) for name in own}
    differing = [place for each in found.values() for place in each if place is not None]
    answers: list[Any] = []
    if differing:
        run = {"scores": scoring(differing, VOCABULARY)}
        answers = _served(plain | {"max_logprobs": -1}, run)["scores"].outputs
    scores = iter(scores_of(answers))
    verdicts = {}
    for name, each in found.items():
        known = [next(scores) for place in each if place is not None]
        outputs = [wanted[request.key] for request in RUN.requests]
        verdicts[name] = verdict(each, outputs, known, noise, MARGINS["bfloat16"])
    return Compared(verdicts, own)


def _served(engine: dict[str, Any], runs: dict[str, Run]) -> dict[str, Result]:
    """Serve, or skip the test if vLLM has no kernel for these weights on this processor."""
    try:
        return serve(engine, runs, threads=1)
    except RuntimeError as error:
        for reason in NO_KERNEL:
            if reason in str(error):
                pytest.skip(f"vLLM runs no such weights here: {reason}")
        raise


@pytest.mark.parametrize("form", NAMES)
def test_the_tokens_are_those_of_the_quantised_target_but_for_ties(
    form: str, compared: Callable[[str], Compared], tell: Callable[[str], None]
) -> None:
    found = compared(form).verdicts["sound"]
    tell(f"{form}: {found.as_json()}")
    assert found.unexcused == 0
    assert found.excused < found.requests / 2
    assert found.tokens > 600


@pytest.mark.parametrize("form", NAMES)
def test_a_broken_walk_changes_tokens_beyond_ties(
    form: str, compared: Callable[[str], Compared]
) -> None:
    assert compared(form).verdicts["broken"].unexcused > 0


@pytest.mark.parametrize("form", NAMES)
def test_the_quantised_target_accepts_tokens_of_the_quantised_draft(
    form: str, compared: Callable[[str], Compared]
) -> None:
    assert accepted_per_step(compared(form).trees["sound"]) > 0.8
