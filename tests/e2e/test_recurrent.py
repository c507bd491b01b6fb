"""Targets with recurrent layers: the tokens are those of the engine without trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import sabotage_of_states
import workload
from comparison import accepted_per_step, by_request, mismatches
from device_identity import VOCABULARY, noise
from engine_process import Request, Result, Run, serve
from features import PROMPTS, SEEDS
from margins import MARGINS, Scores, places, scores_of, scoring, verdict
from random_targets import MODULES, random_target
from ranks import serve_on_ranks
from slow import marked

pytestmark = pytest.mark.e2e

NODES = 8
KINDS = ("nemotron_h", "lfm2", "qwen3_next")
IN_FLOAT32 = {"qwen3_next": {"worker_extension_cls": "float32_delta_net.Extension"}}
"""What the engine without trees takes besides."""
TREES = [
    (engine, kind)
    for kind in KINDS
    for engine in ("draft", "look-up", "head", "two ranks", "compiled")
    if engine != "head" or kind in MODULES
]
SLOW = ("two ranks", "compiled")
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
HALF = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
BROKEN = [each.__name__ for each in sabotage_of_states.BROKEN]

Engines = Mapping[str, tuple[dict[str, Any], dict[str, Run]]]


def _engines(model: str, kind: str) -> Engines:
    """Arguments and runs by name."""
    # vLLM's operator for a CPU rotates heads of other tokens where a model gives it three axes.
    common = {
        "model": model,
        "enable_prefix_caching": False,
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    }
    plain, draft = workload.without_tree() | common, workload.tree(NODES) | common
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | common | TIGHT
    sound, broken = {"sound": RUN}, {name: Run(REQUESTS, sabotage=name) for name in BROKEN}
    return {
        "plain": (plain | IN_FLOAT32.get(kind, {}), sound),
        "draft": (draft, sound | broken | {"again": RUN}),
        "look-up": (look_up, sound | {"aborted": ABORTED, "again": RUN}),
        "head": (workload.with_head(model, "mtp", NODES, budget="fixed") | common, sound),
        "two ranks": (draft, sound),
        "compiled": (draft | {"enforce_eager": False}, sound),
        "plain in bfloat16": (plain | HALF | {"max_logprobs": -1}, sound),
        "draft in bfloat16": (draft | HALF, sound | {"commit_dropped": broken["commit_dropped"]}),
    }


@dataclass(frozen=True, eq=False)
class Target:
    """A target, and what its engines did."""

    engines: Engines
    results: dict[str, Mapping[str, Result]] = field(default_factory=dict)

    def served(self, engine: str) -> Mapping[str, Result]:
        if engine not in self.results:
            arguments, runs = self.engines[engine]
            if engine == "two ranks":
                ranked = serve_on_ranks(arguments, runs)
                self.results[engine] = {name: each.result for name, each in ranked.items()}
            else:
                self.results[engine] = serve(arguments, runs, threads=1)
        return self.results[engine]

    def differing(self, engine: str, name: str, plain: str = "plain") -> int:
        run, wanted = self.engines[engine][1][name], by_request(RUN, self.served(plain)["sound"])
        return len(mismatches(run, self.served(engine)[name], wanted))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    @cache
    def of_kind(kind: str) -> Target:
        folder = tmp_path_factory.mktemp("targets") / kind
        return Target(_engines(str(random_target(folder, kind)), kind))

    return of_kind


@pytest.mark.parametrize(("engine", "kind"), marked(TREES, SLOW))
def test_no_token_differs(engine: str, kind: str, target: Callable[[str], Target]) -> None:
    own = target(kind)
    names = [name for name in own.engines[engine][1] if name not in BROKEN]
    assert {name: own.differing(engine, name) for name in names} == dict.fromkeys(names, 0)
    assert accepted_per_step(own.served(engine)["sound"]) > 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", BROKEN)
def test_tokens_differ_if_states_are_wrong(
    kind: str, broken: str, target: Callable[[str], Target]
) -> None:
    assert target(kind).differing("draft", broken) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    kind: str, target: Callable[[str], Target], tell: Callable[[str], None]
) -> None:
    own = target(kind)
    plain, trees = own.served("plain in bfloat16")["sound"], own.served("draft in bfloat16")
    found = places(RUN, trees["sound"], by_request(RUN, plain))
    apart = [place for place in found if place is not None]
    scores: list[Scores] = []
    if apart:
        runs = {"scores": scoring(apart, VOCABULARY)}
        answers = serve(own.engines["plain in bfloat16"][0], runs, threads=1)["scores"].outputs
        scores = scores_of([answer for answer in answers if answer is not None])
    answers = [answer for answer in plain.outputs if answer is not None]
    judged = verdict(found, answers, scores, noise, MARGINS["bfloat16"])
    tell(f"{kind} in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    dropped = own.differing("draft in bfloat16", "commit_dropped", "plain in bfloat16")
    assert dropped > len(REQUESTS) // 2
