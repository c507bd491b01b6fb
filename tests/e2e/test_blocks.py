"""Block drafts: the tokens are those without trees. `test_draft_rows` has the rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import blocks
import pytest
import workload
from comparison import accepted_per_step, by_request, explain, mismatches
from engine_process import Result, Run, serve
from random_engines import ABORTED, REQUESTS, RUN, Target

pytestmark = pytest.mark.e2e


RUNS = {
    "sound": Run([*REQUESTS, *workload.EVERYTHING[::6]]),
    "aborted": ABORTED,
    "again": Run([*REQUESTS, *workload.DEMANDING]),
}
EVERY = Run([*{request.key: request for run in RUNS.values() for request in run.requests}.values()])
TIGHT = {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 20}
Served = Mapping[str, Mapping[str, Result]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Serve without trees; with DFlash, look-up, chunks of prompts and preemption; and with DSpark
    alone."""
    folder = tmp_path_factory.mktemp("served")
    block = blocks.random_block(folder / "block", seed=1)
    other = blocks.random_block(folder / "other", seed=1, of_parent=True)
    alone = workload.with_block(other, "dspark", node_budget=24, budget="fixed", lookup="off")
    return {
        "plain": serve(workload.without_tree(), {"every": EVERY}, threads=1),
        "block": serve(workload.with_block(block) | TIGHT | workload.STEADY, RUNS, threads=1),
        "alone": serve(alone, {"sound": RUNS["sound"]}, threads=1),
    }


@pytest.mark.parametrize(("engine", "run"), [*(("block", run) for run in RUNS), ("alone", "sound")])
def test_the_tokens_are_those_without_trees(engine: str, run: str, served: Served) -> None:
    plain = by_request(EVERY, served["plain"]["every"])
    found = mismatches(RUNS[run], served[engine][run], plain)
    assert not found, explain(found)
    if run != "aborted":  # With an adaptive budget, trees of random weights are small.
        assert accepted_per_step(served[engine][run]) > (0.02 if engine == "block" else 0.3)


def test_requests_are_preempted(served: Served) -> None:
    assert served["block"]["again"].metrics["vllm:num_preemptions_total"] > 0


@pytest.mark.slow
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Control: with keys and values left where the tree put them, more of them differ."""
    block, half = blocks.random_block(tmp_path / "block"), {"dtype": "bfloat16"}
    broken = Run(RUN.requests, sabotage="without_kv_move")
    own = Target(
        {
            "plain in bfloat16": (
                workload.without_tree() | half | {"max_logprobs": -1},
                {"sound": RUN},
            ),
            "draft in bfloat16": (
                workload.with_block(block, budget="fixed", lookup="off") | half,
                {"sound": RUN, "broken": broken},
            ),
        }
    )
    judged = own.in_bfloat16()
    tell(f"a block draft in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    assert accepted_per_step(own.served("draft in bfloat16")["sound"]) > 0.5
    unmoved = own.differing("draft in bfloat16", "broken", "plain in bfloat16")
    assert unmoved > judged.excused


@pytest.mark.slow
def test_compiled_models_say_the_same(served: Served, tmp_path: Path) -> None:
    block = blocks.random_block(tmp_path / "block", seed=1)
    compiled = workload.with_block(block, budget="fixed") | {"enforce_eager": False}
    run = Run(REQUESTS)
    found = serve(compiled, {"compiled": run}, threads=1)["compiled"]
    differing = mismatches(run, found, by_request(EVERY, served["plain"]["every"]))
    assert not differing, explain(differing)
    assert accepted_per_step(found) > 0.5
