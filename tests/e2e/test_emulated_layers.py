"""Recurrent layers in the CUDA engine, emulated on a CPU: the tokens are those without trees.

emulated/__init__.py says what is emulated, and what that cannot show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import workload
from comparison import accepted_per_step, by_request, mismatches
from emulated_engine import Emulated, serve_emulated
from engine_process import Result, Run, serve
from random_engines import REQUESTS
from random_targets import random_target

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NODES = 4
LIMITS = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 64,
}
TARGETS: dict[str, dict[str, Any]] = {"nemotron_h": {"enable_prefix_caching": False}}
"""Arguments of both engines by model types."""
REQUESTED = [
    replace(request, params={**request.params, "max_tokens": 7}, keep=keep)
    for request, keep in zip(REQUESTS, (1, 9, 52, 17, 5), strict=False)
]
"""Prompts of one token, of a few, and of two chunks."""
SOUND = Run(REQUESTED)
BROKEN = ("commit_dropped", "commit_to_a_neighbour")


@dataclass(frozen=True)
class Served:
    """What an engine without trees gave, and an emulated one by the names of its runs."""

    plain: Result
    emulated: Mapping[str, Emulated]

    def differing(self, name: str) -> int:
        result = self.emulated[name].result
        return len(mismatches(SOUND, result, by_request(SOUND, self.plain)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    @cache
    def of_kind(kind: str) -> Served:
        model = str(random_target(tmp_path_factory.mktemp("targets") / kind, kind))
        # vLLM's operator for a CPU rotates heads of other tokens where a model gives it three axes.
        options: dict[str, Any] = {"custom_ops": ["-rotary_embedding"]}
        common = LIMITS | TARGETS[kind] | {"model": model, "compilation_config": options}
        plain = serve(workload.without_tree() | common, {"": SOUND}, threads=1)[""]
        trees = workload.without_draft(NODES, "ngram_gpu", budget="fixed")
        sizes = [requests * (NODES + 1) for requests in (1, 2, 4)]
        graphs = options | {"mode": 0, "cudagraph_capture_sizes": sizes}
        trees |= common | {"enforce_eager": False, "compilation_config": graphs}
        runs = {"sound": SOUND, "again": SOUND}
        runs |= {name: Run(REQUESTED, sabotage=name) for name in BROKEN}
        return Served(plain, serve_emulated(trees, runs))

    return of_kind


@pytest.mark.parametrize("kind", TARGETS)
def test_the_tokens_are_those_without_trees(kind: str, served: Callable[[str], Served]) -> None:
    own = served(kind)
    assert [own.differing(name) for name in ("sound", "again")] == [0, 0]
    sound = own.emulated["sound"]
    assert accepted_per_step(sound.result) > 0.3
    assert sound.replays["target"] > 0
    assert sound.replays["verification"] > 0


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_changes_tokens(
    kind: str, broken: str, served: Callable[[str], Served]
) -> None:
    assert served(kind).differing(broken) > 0
