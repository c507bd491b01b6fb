"""Targets with recurrent layers: the tokens are those of the engine without trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import sabotage_of_states
import workload
from comparison import accepted_per_step
from engine_process import Run
from random_engines import ABORTED, FLOAT32_DELTA_NET, NODES, REQUESTS, RUN, Engines, Target
from random_targets import MODULES, random_target
from slow import marked
from vision_targets import head_of

pytestmark = pytest.mark.e2e

KINDS = ("nemotron_h", "lfm2", "qwen3_next")
IN_FLOAT32 = {"qwen3_next": FLOAT32_DELTA_NET}
OF_KINDS = {"head": tuple(MODULES), "EAGLE-3": ("qwen3_next",)}
"""Kinds of targets of some engines."""
TREES = [
    (engine, kind)
    for kind in KINDS
    for engine in ("draft", "look-up", "head", "EAGLE-3", "two ranks", "two stages", "compiled")
    if kind in OF_KINDS.get(engine, KINDS)
]
SLOW = ("EAGLE-3", "two ranks", "two stages", "compiled")
TIGHT = {"max_num_batched_tokens": 48, "max_num_seqs": 8}
HALF = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
BROKEN = [each.__name__ for each in sabotage_of_states.BROKEN]
OF_STAGES = ("commit_dropped", "commit_of_the_latest_forward")
"""Controls on the first stage alone."""


def _engines(model: Path, kind: str) -> Engines:
    """Arguments and runs by name."""
    eagle = head_of(model.with_name(f"{kind} head"), model) if kind in MODULES else None
    # vLLM's operator for a CPU rotates heads of other tokens where a model gives it three axes.
    common = {
        "model": str(model),
        "enable_prefix_caching": False,
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    }
    plain, draft = workload.without_tree() | common, workload.tree(NODES) | common
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | common | TIGHT
    sound, broken = {"sound": RUN}, {name: Run(REQUESTS, sabotage=name) for name in BROKEN}
    staged = {name: Run(REQUESTS, sabotage=name) for name in OF_STAGES}
    head = workload.with_head(model, "mtp", NODES, budget="fixed") | common
    piped = (head if kind == "qwen3_next" else draft) | TIGHT
    return {
        "plain": (plain | IN_FLOAT32.get(kind, {}), sound),
        "draft": (draft, sound | broken | {"again": RUN}),
        "look-up": (look_up, sound | {"aborted": ABORTED, "again": RUN}),
        "head": (head, sound),
        "EAGLE-3": (workload.with_head(eagle, nodes=NODES, budget="fixed") | common, sound),
        "two ranks": (draft, sound),
        # So few tokens in a batch that two batches are under way.
        "two stages": (piped, sound | {"aborted": ABORTED} | staged | {"again": RUN}),
        "compiled": (draft | {"enforce_eager": False}, sound),
        "plain in bfloat16": (plain | HALF | {"max_logprobs": -1}, sound),
        "draft in bfloat16": (draft | HALF, sound | {"commit_dropped": broken["commit_dropped"]}),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    @cache
    def of_kind(kind: str) -> Target:
        folder = tmp_path_factory.mktemp("targets") / kind
        return Target(_engines(random_target(folder, kind), kind))

    return of_kind


@pytest.mark.parametrize(("engine", "kind"), marked(TREES, SLOW))
def test_no_token_differs(engine: str, kind: str, target: Callable[[str], Target]) -> None:
    own = target(kind)
    names = [name for name, run in own.engines[engine][1].items() if run.sabotage is None]
    assert {name: own.differing(engine, name) for name in names} == dict.fromkeys(names, 0)
    assert accepted_per_step(own.served(engine)["sound"]) > 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", BROKEN)
def test_tokens_differ_if_states_are_wrong(
    kind: str, broken: str, target: Callable[[str], Target]
) -> None:
    assert target(kind).differing("draft", broken) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", OF_STAGES)
def test_tokens_differ_if_the_states_of_a_stage_are_wrong(
    kind: str, broken: str, target: Callable[[str], Target]
) -> None:
    assert target(kind).differing("two stages", broken) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    kind: str, target: Callable[[str], Target], tell: Callable[[str], None]
) -> None:
    own = target(kind)
    judged = own.in_bfloat16()
    tell(f"{kind} in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    dropped = own.differing("draft in bfloat16", "commit_dropped", "plain in bfloat16")
    assert dropped > len(REQUESTS) // 2
