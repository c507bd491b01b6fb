"""Targets with multi-head latent attention: the tokens are those of the engine without trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import workload
from comparison import accepted_per_step
from engine_process import Run
from latent_targets import latent_target
from random_engines import ABORTED, NODES, REQUESTS, RUN, Engines, Target
from slow import marked

pytestmark = pytest.mark.e2e

SOFTMAX, SIGMOID = "deepseek_v2", "deepseek_v3"
"""Targets by what routes to their experts. The second has a module of multi-token prediction, which
vLLM runs whenever the target's own folder is to draft."""
TREES = [
    ("draft", SOFTMAX),
    ("look-up", SOFTMAX),
    ("module", SIGMOID),
    ("compiled", SOFTMAX),
]
SLOW = ("compiled",)
BROKEN = ("without_kv_move", "wrong_ancestor_bit", "chain_positions", "without_rope_part")
HALF = {"dtype": "bfloat16"}
FEW_BLOCKS = {"num_gpu_blocks_override": 40}
"""Of 16 positions, which vLLM's kernel for CPUs asks for."""


def _engines(model: str) -> Engines:
    """Arguments and runs by name. The draft is the target itself."""
    target = {"model": model}
    plain = workload.without_tree() | target
    draft = workload.tree(NODES, lookup="off") | target
    draft["speculative_config"] = {**draft["speculative_config"], "model": model}
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | target
    module = workload.with_head(model, "mtp", NODES, budget="fixed", lookup="off")
    sound, broken = {"sound": RUN}, {name: Run(REQUESTS, sabotage=name) for name in BROKEN}
    return {
        "plain": (plain, sound),
        "dense": (plain, sound),
        "draft": (draft, sound | broken | {"again": RUN}),
        "look-up": (look_up | FEW_BLOCKS, sound | {"aborted": ABORTED, "again": RUN}),
        "module": (module, sound | {"again": RUN}),
        "compiled": (draft | {"enforce_eager": False}, sound),
        "plain in bfloat16": (plain | HALF | {"max_logprobs": -1}, sound),
        "draft in bfloat16": (draft | HALF, sound | {"without_kv_move": broken["without_kv_move"]}),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    @cache
    def of_kind(kind: str) -> Target:
        model = latent_target(tmp_path_factory.mktemp("targets") / kind, kind)
        return Target(_engines(str(model)), {"dense": {"VLLM_MLA_DISABLE": "1"}})

    return of_kind


@pytest.mark.parametrize(("engine", "kind"), marked(TREES, SLOW))
def test_no_token_differs(engine: str, kind: str, target: Callable[[str], Target]) -> None:
    own = target(kind)
    names = [name for name in own.engines[engine][1] if name not in BROKEN]
    assert {name: own.differing(engine, name) for name in names} == dict.fromkeys(names, 0)
    least = {"look-up": 0.5, "module": 0.5}.get(engine, 3)
    assert accepted_per_step(own.served(engine)["sound"]) > least


def test_requests_are_preempted(target: Callable[[str], Target]) -> None:
    metrics = target(SOFTMAX).served("look-up")["sound"].metrics
    assert metrics["vllm:num_preemptions_total"] > 0


def test_keys_and_values_of_every_head_give_the_same_tokens(
    target: Callable[[str], Target],
) -> None:
    """vLLM's other way to run these models reads no latent cache, and is an independent oracle."""
    own = target(SOFTMAX)
    layouts = [own.served(engine)["sound"].layout for engine in ("plain", "dense")]
    assert layouts == ["None", "vec16"]
    assert own.differing("dense", "sound") == 0


@pytest.mark.parametrize("broken", BROKEN)
def test_tokens_differ_if_attention_is_wrong(broken: str, target: Callable[[str], Target]) -> None:
    assert target(SOFTMAX).differing("draft", broken) > 0


def test_in_bfloat16_tokens_differ_by_rounding_alone(
    target: Callable[[str], Target], tell: Callable[[str], None]
) -> None:
    own = target(SOFTMAX)
    judged = own.in_bfloat16()
    tell(f"latent attention in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    unmoved = own.differing("draft in bfloat16", "without_kv_move", "plain in bfloat16")
    assert unmoved > judged.excused
