"""Targets with recurrent layers: the tokens are those of the engine without trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import sabotage_of_states
import workload
from comparison import accepted_per_step, by_request, mismatches
from engine_process import Request, Result, Run, serve
from features import PROMPTS, SEEDS
from random_targets import random_target

pytestmark = pytest.mark.e2e

NODES = 8
KINDS = ("nemotron_h", "lfm2")
FEW = {"allowed_token_ids": [300, 301, 302]}
"""Random weights repeat nothing. Of so few tokens, look-up and a draft guess many."""


def _request(number: int, **params: Any) -> Request:
    """One of three temperatures; prompts of one token, of a few, and of several chunks."""
    temperature = (0, 0.7, 1)[number % 3]
    seed = {"seed": SEEDS[number]} if temperature else {}
    keep = (1, 9, 30, None)[number % 4]
    text = PROMPTS[number] * (1 + number % 2)
    return Request(text, {"temperature": temperature, "max_tokens": 40} | seed | params, keep=keep)


REQUESTS = [
    *(_request(number, **FEW) for number in range(24)),
    *(_request(number, stop=["e", "ti"]) for number in range(24, 30)),
]
RUN = Run(REQUESTS)
ABORTED = Run(REQUESTS, abort_after={number: 2 + number % 5 for number in range(0, 30, 2)})

TIGHT = {"max_num_batched_tokens": 48, "max_num_seqs": 8}


def _engines(model: str) -> dict[str, tuple[dict[str, Any], dict[str, Run]]]:
    """Arguments and runs by name."""
    # vLLM's operator for a CPU rotates heads of other tokens where a model gives it three axes.
    common = {
        "model": model,
        "enable_prefix_caching": False,
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    }
    broken = {each.__name__: Run(REQUESTS, sabotage=each.__name__) for each in BROKEN}
    return {
        "plain": (workload.without_tree() | common, {"sound": RUN}),
        "draft": (workload.tree(NODES) | common, {"sound": RUN, **broken, "again": RUN}),
        "look-up": (
            workload.without_draft(NODES, "ngram_gpu", budget="fixed") | common | TIGHT,
            {"sound": RUN, "aborted": ABORTED, "again": RUN},
        ),
    }


BROKEN = sabotage_of_states.BROKEN
Results = Mapping[str, Mapping[str, Result]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    @cache
    def serve_all(kind: str) -> Results:
        model = str(random_target(tmp_path_factory.mktemp("targets") / kind, kind))
        jobs = _engines(model)
        return {name: serve(*job, threads=1) for name, job in jobs.items()}

    return serve_all


def _differing(results: Results, engine: str, name: str) -> int:
    run = ABORTED if name == "aborted" else RUN
    return len(mismatches(run, results[engine][name], by_request(RUN, results["plain"]["sound"])))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["draft", "look-up"])
def test_no_token_differs(kind: str, engine: str, served: Callable[[str], Results]) -> None:
    results = served(kind)
    found = {
        name: _differing(results, engine, name)
        for name in results[engine]
        if name in ("sound", "aborted", "again")
    }
    assert found == dict.fromkeys(found, 0)
    assert accepted_per_step(results[engine]["sound"]) > 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [each.__name__ for each in BROKEN])
def test_tokens_differ_if_states_are_wrong(
    kind: str, broken: str, served: Callable[[str], Results]
) -> None:
    assert _differing(served(kind), "draft", broken) > 0
