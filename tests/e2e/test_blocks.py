"""Block drafts: the tokens are those without trees. `test_draft_rows` has the rows of logits."""

from __future__ import annotations

from collections.abc import Callable

import blocks
import masked_drafts
import pytest
import workload
from comparison import accepted_per_step
from engine_process import Run
from random_engines import ABORTED, REQUESTS, RUN, Target

pytestmark = pytest.mark.e2e

RUNS = {
    "sound": Run([*REQUESTS, *workload.EVERYTHING[::6]]),
    "aborted": ABORTED,
    "again": Run([*REQUESTS, *workload.DEMANDING]),
}
EVERY = Run([*{request.key: request for run in RUNS.values() for request in run.requests}.values()])
TIGHT = {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 20}
HALF = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Engines without trees; with DFlash and with PARD, look-up, chunks of prompts and preemption;
    with DSpark and with P-EAGLE alone; and with compiled models and in bfloat16."""
    folder = tmp_path_factory.mktemp("served")
    block = blocks.random_block(folder / "block", seed=1)
    other = blocks.random_block(folder / "other", seed=1, of_parent=True)
    masked = masked_drafts.served(masked_drafts.pard(folder / "pard"), "draft_model")
    head = masked_drafts.peagle(folder / "head")
    of_head = masked_drafts.served(head, "eagle3", node_budget=24, budget="fixed", lookup="off")
    whole = workload.with_block(block, budget="fixed")
    alone = workload.with_block(other, "dspark", node_budget=24, budget="fixed", lookup="off")
    half = workload.with_block(block, budget="fixed", lookup="off") | HALF
    broken = Run(RUN.requests, sabotage="without_kv_move")
    return Target(
        {
            "plain": (workload.without_tree(), {"sound": EVERY}),
            "block": (workload.with_block(block) | TIGHT | workload.STEADY, RUNS),
            "masked": (masked | TIGHT | workload.STEADY, RUNS),
            "masked head": (of_head, {"sound": RUNS["sound"]}),
            "alone": (alone, {"sound": RUNS["sound"]}),
            "compiled": (whole | {"enforce_eager": False}, {"sound": Run(REQUESTS)}),
            "plain in bfloat16": (
                workload.without_tree() | HALF | {"max_logprobs": -1},
                {"sound": RUN},
            ),
            "draft in bfloat16": (half, {"sound": RUN, "broken": broken}),
        }
    )


@pytest.mark.parametrize(
    ("engine", "run", "least"),
    [
        # With an adaptive budget, trees of random weights are small.
        ("block", "sound", 0.02),
        ("block", "aborted", 0),
        ("block", "again", 0.02),
        ("alone", "sound", 0.3),
        ("masked", "sound", 0.3),
        ("masked", "aborted", 0),
        ("masked", "again", 0.3),
        ("masked head", "sound", 0.02),
        pytest.param("compiled", "sound", 0.5, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_are_those_without_trees(
    engine: str, run: str, least: float, target: Target
) -> None:
    assert target.differing(engine, run) == 0
    if least:
        assert accepted_per_step(target.served(engine)[run]) > least


@pytest.mark.parametrize("engine", ["block", "masked"])
def test_requests_are_preempted(engine: str, target: Target) -> None:
    assert target.served(engine)["again"].metrics["vllm:num_preemptions_total"] > 0


@pytest.mark.slow
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    target: Target, tell: Callable[[str], None]
) -> None:
    """Control: with keys and values left where the tree put them, more of them differ."""
    judged = target.in_half()
    tell(f"a block draft in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    assert accepted_per_step(target.served("draft in bfloat16")["sound"]) > 0.5
    unmoved = target.differing("draft in bfloat16", "broken", "plain in bfloat16")
    assert unmoved > judged.excused
