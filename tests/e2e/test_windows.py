"""Targets with windows, soft caps and sinks: the tokens are those of the engine without trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import accepted_per_step, by_request, mismatches
from engine_process import Result, Run, serve
from features import long
from random_engines import RUN as SHORT
from random_engines import Target
from random_targets import changed_copy, random_target
from sabotage_of_windows import OF_WINDOWS
from slow import marked

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

NODES = 8
KINDS = ("gemma2", "gemma3_text", "mistral", "gpt_oss")
OWN = {"gemma2": ["without_soft_cap"], "gpt_oss": ["without_sinks"]}
"""Ways to break what only some targets have."""
FEW = {"allowed_token_ids": [300, 301, 302], "max_tokens": 40}
"""Random weights repeat nothing. Of so few tokens, look-up and a draft guess many."""
REQUESTS = [
    long(number, ("greedy", "full")[number % 2], 40 + number * 37 % 161, **FEW)
    for number in range(24)
]
RUN = Run(REQUESTS)
TIGHT = {
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 18,
}
"""Prompts come in chunks, and requests are preempted."""
Results = Mapping[str, Mapping[str, Result]]


def _engines(kind: str, model: str) -> dict[str, tuple[dict[str, Any], dict[str, Run]]]:
    """Arguments and runs by name."""
    of = {"model": model}
    broken = [*(each.__name__ for each in OF_WINDOWS), *OWN.get(kind, ()), "without_kv_move"]
    runs = {name: Run(REQUESTS, sabotage=name) for name in (*broken, "null_block_of_nan")}
    return {
        "plain": (workload.without_tree() | of, {"sound": RUN}),
        "draft": (workload.tree(NODES) | of, {"sound": RUN, "again": RUN, **runs}),
        "look-up": (
            workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of | TIGHT,
            {"sound": RUN, "again": RUN},
        ),
        "one group": (
            workload.tree(NODES) | of | {"disable_hybrid_kv_cache_manager": True},
            {"sound": RUN},
        ),
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    @cache
    def serve_all(kind: str) -> Results:
        model = str(random_target(tmp_path_factory.mktemp("targets") / kind, kind))
        return {name: serve(*job, threads=1) for name, job in _engines(kind, model).items()}

    return serve_all


def _differing(results: Results, engine: str, name: str) -> int:
    plain = by_request(RUN, results["plain"]["sound"])
    return len(mismatches(RUN, results[engine][name], plain))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["draft", "look-up", "one group"])
def test_no_token_differs(kind: str, engine: str, served: Callable[[str], Results]) -> None:
    results = served(kind)
    sound = [each for each in results[engine] if each in ("sound", "again", "null_block_of_nan")]
    assert {name: _differing(results, engine, name) for name in sound} == dict.fromkeys(sound, 0)
    assert accepted_per_step(results[engine]["sound"]) > 0.5
    preempted = results[engine]["sound"].metrics["vllm:num_preemptions_total"]
    # Windows in all layers leave blocks enough.
    assert (preempted > 0) == (engine == "look-up" and kind != "mistral")
    if engine == "draft":
        assert results[engine]["again"].metrics["vllm:prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_differ_if_a_mechanism_is_broken(
    kind: str, served: Callable[[str], Results]
) -> None:
    results = served(kind)
    sound = ("sound", "again", "null_block_of_nan")
    found = {
        name: _differing(results, "draft", name) for name in results["draft"] if name not in sound
    }
    assert all(found.values()), found


@pytest.mark.parametrize("kind", marked(KINDS, {"gemma3_text", "mistral"}))
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    kind: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    of = {"model": str(random_target(tmp_path / kind, kind)), "dtype": "bfloat16"}
    broken = Run(SHORT.requests, sabotage="without_kv_move")
    own = Target(
        {
            "plain in bfloat16": (
                workload.without_tree() | of | {"max_logprobs": -1},
                {"sound": SHORT},
            ),
            "draft in bfloat16": (workload.tree(NODES) | of, {"sound": SHORT, "broken": broken}),
        }
    )
    judged = own.in_bfloat16()
    tell(f"{kind} in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(SHORT.requests) // 5
    unmoved = own.differing("draft in bfloat16", "broken", "plain in bfloat16")
    assert unmoved > judged.excused


TRAINED = Run(
    [long(number, "greedy", 40 + number * 37 % 161, max_tokens=40) for number in range(16)]
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Serve the embedded target with windows in every second layer, with drafts and a head."""
    folder, source = tmp_path_factory.mktemp("trained"), Path(pair.paths()["target"])
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 16}
    of = {"model": str(changed_copy(source, folder / "target", **kinds))}
    runs = {"sound": TRAINED}
    twin = workload.tree(5, width=1, max_depth=5, children=1, lookup="off") | of
    twin["speculative_config"] |= of
    head = workload.with_head(pair.paths()["eagle3"], nodes=NODES, budget="fixed") | of
    wrong = Run(TRAINED.requests, sabotage="draft_without_window")
    return {
        "plain": serve(workload.without_tree() | of, runs, 1),
        "twin": serve(twin, runs | {"wrong": wrong}, 1),
        "head": serve(head, runs, 1),
    }


def test_drafts_have_their_windows(trained: Results) -> None:
    plain = by_request(TRAINED, trained["plain"]["sound"])
    for engine, run in (("twin", "sound"), ("twin", "wrong"), ("head", "sound")):
        assert not mismatches(TRAINED, trained[engine][run], plain)
    # A draft that is the target guesses all; the last step may have no room for that.
    assert accepted_per_step(trained["twin"]["sound"]) > 4.5
    assert accepted_per_step(trained["twin"]["wrong"]) < 4
    assert accepted_per_step(trained["head"]["sound"]) > 0.3
