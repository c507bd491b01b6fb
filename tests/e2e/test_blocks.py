"""Block drafts: the tokens are those without trees. `test_draft_rows` has the rows of logits, and
`test_head_chain` what is accepted of vLLM's chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import workload
from block_engines import PLAIN, block_engine
from comparison import accepted_per_step
from engine_process import Run
from random_engines import ABORTED, CONTINUED, REQUESTS, RUN, Target

pytestmark = pytest.mark.e2e

SOUND = Run([*REQUESTS, *workload.EVERYTHING[::6]])
RUNS = {"aborted": ABORTED, "sound": Run([*SOUND.requests, *workload.DEMANDING[::2]])}
EVERY = Run([*RUNS["sound"].requests, *CONTINUED.requests])
TIGHT = {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 20}
BESIDE_WINDOWS = {"num_gpu_blocks_override": 60}
"""Layers with windows are in a cache group of their own."""
HALF = {"dtype": "bfloat16"}


def _engines(draft: str, make: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """With look-up, chunks of prompts and preemption; with the draft alone, in larger trees."""
    whole = make(node_budget=24, budget="fixed", lookup="off")
    tight = make() | TIGHT | (BESIDE_WINDOWS if draft == "Muse-Glimmer" else {})
    forgotten = replace(CONTINUED, sabotage="forgotten_prefix")
    broken = Run(RUN.requests, sabotage="without_kv_move")
    return {
        f"{draft} in chunks": (tight | workload.STEADY, RUNS),
        f"{draft} alone": (whole, {"sound": SOUND}),
        f"{draft} compiled": (whole | {"enforce_eager": False}, {"sound": RUN}),
        f"{draft} with a cache": (whole, {"sound": CONTINUED, "forgotten": forgotten}),
        f"{draft} without": (whole | {"enable_prefix_caching": False}, {"sound": CONTINUED}),
        f"{draft} in bfloat16": (whole | HALF, {"sound": RUN, "broken": broken}),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("served")
    in_half = workload.without_tree() | HALF | {"max_logprobs": -1}
    engines: dict[str, Any] = {
        "plain": (workload.without_tree(), {"sound": EVERY}),
        "plain in bfloat16": (in_half, {"sound": RUN}),
    }
    for draft in PLAIN:
        engines |= _engines(draft, block_engine(draft, folder / draft, seed=1))
    return Target(engines)


@pytest.mark.parametrize(
    ("engine", "draft", "least"),
    [
        # With an adaptive budget, trees of random weights are small.
        pytest.param("in chunks", "DFlash", 0.02, marks=pytest.mark.slow),
        ("in chunks", "DFlash2", 0.02),
        pytest.param("in chunks", "Muse-Glimmer", 0.02, marks=pytest.mark.slow),
        ("in chunks", "PARD", 0.3),
        ("alone", "DSpark", 0.3),
        ("alone", "P-EAGLE", 0.3),
        pytest.param("compiled", "DFlash", 0.5, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_are_those_without_trees(
    engine: str, draft: str, least: float, target: Target, tell: Callable[[str], None]
) -> None:
    name = f"{draft} {engine}"
    results = target.served(name)
    assert {run: target.differing(name, run) for run in results} == dict.fromkeys(results, 0)
    accepted = accepted_per_step(results["sound"])
    tell(f"{name}: {accepted:.3f}")
    assert accepted > least
    if engine == "in chunks":
        assert results["sound"].metrics["vllm:num_preemptions_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["PARD"])
def test_a_draft_reads_its_own_cache_after_a_prefix_hit(
    draft: str, target: Target, tell: Callable[[str], None]
) -> None:
    """It accepts what it accepts without a prefix cache. Control: less if its cache is cleared."""
    cached, without = (f"{draft} {engine}" for engine in ("with a cache", "without"))
    runs = [(cached, "sound"), (cached, "forgotten"), (without, "sound")]
    assert [target.differing(*run) for run in runs] == [0, 0, 0]
    assert all(each.cached for each in target.served(cached)["sound"].outputs if each)
    found, forgotten, wanted = (accepted_per_step(target.served(e)[r]) for e, r in runs)
    tell(f"{draft}: {found:.3f}, {forgotten:.3f}, {wanted:.3f}")
    assert found == pytest.approx(wanted, rel=0.01)
    assert forgotten < 0.97 * wanted


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["DFlash", "PARD", "P-EAGLE"])
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    draft: str, target: Target, tell: Callable[[str], None]
) -> None:
    """Control: with keys and values left where the tree put them, more of them differ."""
    judged = target.in_half(draft=draft)
    tell(f"{draft} in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    name = f"{draft} in bfloat16"
    assert accepted_per_step(target.served(name)["sound"]) > 0.1
    assert target.differing(name, "broken", "plain in bfloat16") > judged.excused
