"""What a scheduler may do to the layers of test_emulated_layers.py: it preempts requests, aborts
them and finds prompts in the prefix cache, one step ahead of the device or in step with it, on one
rank and on two. The tokens are those without trees.

Those are of the same engine, whose requests want no node and come two at a time, which have room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest
from comparison import accepted_per_step, by_request, mismatches
from emulated_engine import serve_emulated
from emulated_stages import serve_emulated_in_stages
from engine_process import Request, Result, Run
from equal_bits import without_nodes
from random_engines import FEW
from test_emulated_layers import _engines

pytestmark = pytest.mark.e2e

CACHE = {"prefix_cache_retention_interval": None}  # by default, of prompts and no answers
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {},
    "in step": {"async_scheduling": False},
    "two ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
}


@dataclass(frozen=True)
class Kind:
    """A target of test_emulated_layers.py: the ``blocks`` of a cache in which four requests begin
    that cannot all end there; the tokens of a ``block``; what may be ``broken``, of two ranks in
    the first alone."""

    blocks: int
    broken: str = "without_kv_move"
    block: int = 64


KINDS = {
    "deepseek_v32": Kind(6),
    "mimo_v2_flash": Kind(14),
    "qwen3_next, cached": Kind(12, "commit_dropped"),
    "bailing_hybrid, cached": Kind(12, "commit_dropped", block=128),
}
SERVED = [
    *((kind, engine) for kind in KINDS for engine in ("ahead", "two ranks")),
    ("bailing_hybrid, cached", "in step"),
]
CONTROLLED = [each for each in SERVED if each != ("mimo_v2_flash", "two ranks")]
"""What MiMo's first rank does not move changes no token of so short a run."""
FAST = ("bailing_hybrid, cached", "ahead")


def _runs(kind: Kind) -> dict[str, Run]:
    """Requests whose answers pass the end of a block, of which one is aborted while it decodes and
    one while it waits; conversations of them; and, before they lie in a cache, with what is
    broken."""
    requests = [
        Request(
            Random(seed).choices(FEW["allowed_token_ids"], k=kind.block - before),
            {"temperature": seed % 2, "seed": seed, "max_tokens": 24, **FEW},
        )
        for seed, before in enumerate((14, 6, 9, 12, 3))
    ]
    return {
        kind.broken: Run(requests, sabotage=kind.broken),
        "crowd": Run(requests, abort_after={1: 9, 4: 4}),
        "turns": Run([replace(each, turns=2) for each in requests[:3]], batch=2),
    }


@dataclass(frozen=True)
class Served:
    """The runs of a kind, and their results by engine, with those of "plain crowd" and
    "plain turns" by the one "ahead"."""

    runs: Mapping[str, Run]
    results: Callable[[str], Mapping[str, Result]]

    def differing(self, engine: str, name: str) -> int:
        of_plain = "turns" if name == "turns" else "crowd"
        plain = self.results("ahead")[f"plain {of_plain}"]
        wanted = by_request(self.runs[of_plain], plain)
        return len(mismatches(self.runs[name], self.results(engine)[name], wanted))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    @cache
    def of_kind(name: str) -> Served:
        kind, folder = KINDS[name], tmp_path_factory.mktemp("targets")
        trees = _engines(name, folder, "wide look-up").trees
        trees |= CACHE | {"num_gpu_blocks_override": kind.blocks}
        runs = _runs(kind)

        @cache
        def results(engine: str) -> Mapping[str, Result]:
            arguments, asked = trees | ENGINES[engine], dict(runs)
            if engine == "two ranks":
                return serve_emulated_in_stages(arguments, asked)
            for each in ("crowd", "turns") if engine == "ahead" else ():
                asked[f"plain {each}"] = replace(
                    runs[each], requests=without_nodes(runs[each].requests), batch=2, abort_after={}
                )
            found = serve_emulated(arguments, asked)
            return {name: one.result for name, one in found.items()}

        return Served(runs, results)

    return of_kind


def _marked(*parameters: tuple[str, str]) -> list[Any]:
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each != FAST)) for each in parameters]


@pytest.mark.parametrize(("kind", "engine"), _marked(*SERVED))
def test_the_tokens_are_those_without_trees(
    kind: str, engine: str, served: Callable[[str], Served], tell: Callable[[str], None]
) -> None:
    own = served(kind)
    crowd, turns = (own.results(engine)[name] for name in ("crowd", "turns"))
    preempted = crowd.metrics["vllm:num_preemptions_total"]
    cached = [output.cached for output in turns.outputs if output]
    tell(f"{kind} {engine}: {preempted} preempted, {cached} cached, {accepted_per_step(crowd):.2f}")
    assert own.differing(engine, "crowd") == own.differing(engine, "turns") == 0
    assert [at for at, output in enumerate(crowd.outputs) if output is None] == [1, 4]
    assert preempted > 0
    assert any(cached)
    assert accepted_per_step(crowd) > 0.3


@pytest.mark.parametrize(("kind", "engine"), _marked(*CONTROLLED))
def test_what_is_broken_changes_tokens(
    kind: str, engine: str, served: Callable[[str], Served]
) -> None:
    assert served(kind).differing(engine, KINDS[kind].broken) > 0
