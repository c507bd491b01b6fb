"""In a pipeline every stage follows the same trees, and the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import workload
from block_engines import block_engine
from comparison import Outputs, accepted_per_step, explain, mismatches
from engine_process import Result, Run
from random_engines import ABORTED, RUN, Target
from stages import BROKEN, serve_in_stages

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

REQUESTS = workload.each_kind(range(16))
TREES = {
    "trees": Run(REQUESTS),
    "sample": workload.SAMPLE,
    **{name: workload.TREE_RUNS[name] for name in ("continued", "aborted")},
    **{name: Run(REQUESTS, sabotage=name) for name in BROKEN},
}
TIGHT = {
    "demanding": Run(workload.DEMANDING),
    "long prompts": Run(workload.LONG_PROMPTS),
    "sample": workload.SAMPLE,
}
SAME = [name for name in TREES if name not in BROKEN]


@pytest.fixture(scope="module")
def piped() -> Mapping[str, Result]:
    return serve_in_stages(workload.tree(), TREES)


@pytest.fixture(scope="module")
def tight() -> Mapping[str, Result]:
    """A pipeline with a cache so small that requests are preempted, and an adaptive budget."""
    small = {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24}
    return serve_in_stages(workload.with_options() | small, TIGHT)


@pytest.mark.parametrize("name", SAME)
def test_a_pipeline_gives_the_tokens_of_one_stage_without_trees(
    name: str, piped: Mapping[str, Result], plain: Outputs
) -> None:
    found = mismatches(TREES[name], piped[name], plain)
    assert not found, explain(found)


def test_a_pipeline_accepts_what_trees_of_one_stage_do(piped: Mapping[str, Result]) -> None:
    assert accepted_per_step(piped["trees"]) > 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_stage_that_misses_what_the_last_one_decided_changes_tokens(
    name: str, piped: Mapping[str, Result], plain: Outputs
) -> None:
    assert mismatches(TREES[name], piped[name], plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIGHT)
def test_preempted_requests_of_a_pipeline_keep_their_tokens(
    name: str, tight: Mapping[str, Result], plain: Outputs
) -> None:
    found = mismatches(TIGHT[name], tight[name], plain)
    assert not found, explain(found)


@pytest.mark.slow
def test_a_small_cache_preempts_requests_of_a_pipeline(tight: Mapping[str, Result]) -> None:
    assert tight["demanding"].metrics["vllm:num_preemptions_total"] > 0


OTHERS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "look-up alone": (workload.without_draft(method="ngram_gpu", budget="fixed"), 2),
    "a pool": (workload.POOLS["pool"][0], 2),
    "a head": (workload.with_head(pair.paths()["eagle3"], budget="fixed"), 2),
    "three stages": (workload.tree(), 3),
    "two ranks per stage": (workload.tree() | {"tensor_parallel_size": 2}, 2),
}
"""Arguments of engines, and their number of stages."""


@pytest.mark.slow
def test_stages_may_have_other_numbers_of_layers(plain: Outputs) -> None:
    run, shares = Run(REQUESTS), {"VLLM_PP_LAYER_PARTITION": "4,2"}
    result = serve_in_stages(workload.tree(), {"": run}, **shares)[""]
    found = mismatches(run, result, plain)
    assert not found, explain(found)
    assert accepted_per_step(result) > 2


@pytest.mark.slow
def test_vllms_own_chains_do_not_run_in_a_pipeline() -> None:
    """If this fails, vLLM makes draft models whole, and `as_one_stage` can go."""
    chain = workload.with_options()["speculative_config"] | {"num_speculative_tokens": 3}
    engine = workload.without_tree(speculative_config=chain)
    with pytest.raises(RuntimeError, match="failed"):
        serve_in_stages(engine, {"": Run(REQUESTS[:2])})


@pytest.mark.slow
def test_stages_without_trees_give_the_tokens_of_one(plain: Outputs) -> None:
    run = Run(REQUESTS)
    found = mismatches(run, serve_in_stages(workload.without_tree(), {"": run})[""], plain)
    assert not found, explain(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines_give_the_tokens_of_one_stage_without_trees(
    name: str, plain: Outputs
) -> None:
    engine, stages = OTHERS[name]
    run = Run(REQUESTS)
    result = serve_in_stages(engine, {"trees": run}, stages)["trees"]
    found = mismatches(run, result, plain)
    assert not found, explain(found)
    assert accepted_per_step(result) > 0.5


BLOCKS = ("DFlash", "DSpark", "PARD", "P-EAGLE")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("blocks")
    runs = {"sound": RUN, "aborted": ABORTED}
    runs |= {name: Run(RUN.requests, sabotage=name) for name in BROKEN}
    engines = {"plain": (workload.without_tree(), {"sound": RUN})}
    for kind in BLOCKS:
        make = block_engine(kind, folder / kind, seed=1)
        piped = make(node_budget=24, budget="fixed", lookup="off")
        engines[f"{kind} in two stages"] = piped, runs
    return Target(engines)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_draft_on_the_last_stage_gives_the_tokens_without_trees(
    kind: str, blocks: Target, tell: Callable[[str], None]
) -> None:
    """Control: earlier stages that miss the paths or the trees change tokens."""
    name = f"{kind} in two stages"
    accepted = accepted_per_step(blocks.served(name)["sound"])
    found = {run: blocks.differing(name, run) for run in blocks.engines[name][1]}
    tell(f"{name}: {accepted:.3f} accepted, {found}")
    assert found["sound"] == found["aborted"] == 0
    assert all(found[broken] for broken in BROKEN)
    assert accepted > 0.3
