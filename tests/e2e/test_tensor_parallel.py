"""With tensor parallelism, every rank decides the same, and the tokens stay the same."""

from __future__ import annotations

import pytest
import torch
import workload
from comparison import Outputs, explain, mismatches
from engine_process import AS_FOR_USERS, Run
from ranks import Ranked, serve_on_ranks

pytestmark = pytest.mark.e2e

REQUESTS = workload.each_kind(range(16))
UNSEEDED = [workload.ask(number, "full", seed=None) for number in range(8)]
GRAMMARS = workload.TREE_RUNS["structured_output"].requests
RUNS = {
    "trees": Run(REQUESTS),
    "unseeded": Run(UNSEEDED),
    "grammars": Run(GRAMMARS),
}
BROKEN = {
    "unfollowed": Run(GRAMMARS, sabotage="unfollowed"),
    "learns_nothing": Run(REQUESTS, sabotage="learns_nothing"),
    "draws_other_seeds": Run(UNSEEDED, sabotage="draws_other_seeds"),
}
GOES_ON = hasattr(torch.ops._C, "init_shm_manager")
"""Whether an engine goes on if its ranks draft unlike numbers of rows."""
decides_otherwise = pytest.mark.skipif(
    not GOES_ON, reason="without AVX-512 ranks talk by gloo, which ends ranks of unlike rows"
)


@pytest.fixture(scope="module")
def ranked() -> dict[str, Ranked]:
    runs = RUNS | (BROKEN if GOES_ON else {})
    return serve_on_ranks(workload.tree(), runs, **{AS_FOR_USERS: "1"})


@pytest.mark.parametrize("name", ["trees", "grammars"])
def test_two_ranks_give_the_tokens_of_one_without_trees(
    name: str, ranked: dict[str, Ranked], plain: Outputs
) -> None:
    found = mismatches(RUNS[name], ranked[name].result, plain)
    assert not found, explain(found)


@pytest.mark.parametrize("name", ["trees", "unseeded", "grammars"])
def test_every_rank_sees_the_same_trees_and_accepts_the_same_paths(
    name: str, ranked: dict[str, Ranked]
) -> None:
    first, second = ranked[name].traces
    assert first == second
    assert sum(len(step["accepted"]) for step in first) > len(RUNS[name].requests)


@decides_otherwise
@pytest.mark.parametrize("name", BROKEN)
def test_a_rank_that_decides_otherwise_is_seen_in_its_trees(
    name: str, ranked: dict[str, Ranked]
) -> None:
    first, second = ranked[name].traces
    assert [step["tokens"] for step in first] != [step["tokens"] for step in second]


@decides_otherwise
def test_a_rank_with_other_trees_changes_the_tokens(
    ranked: dict[str, Ranked], plain: Outputs
) -> None:
    assert mismatches(BROKEN["learns_nothing"], ranked["learns_nothing"].result, plain)


@pytest.mark.slow
def test_ranks_with_clocks_of_their_own_verify_the_same_cuts(plain: Outputs) -> None:
    """An adaptive budget depends on measured times, which differ from rank to rank."""
    run = Run(REQUESTS)
    ranked = serve_on_ranks(workload.with_options(), {"trees": run})["trees"]
    found = mismatches(run, ranked.result, plain)
    assert not found, explain(found)
    first, second = ranked.traces
    assert first == second
    assert len({len(step["tokens"]) for step in first}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["look-up", "pool", "head"])
def test_ranks_agree_whatever_drafts(engine: str, plain: Outputs) -> None:
    arguments, run = workload.SAME_TOKENS[engine][0], Run(workload.each_kind(range(48)))
    if engine == "head":  # vLLM splits it over the target's ranks all the same
        own = arguments["speculative_config"] | {"draft_tensor_parallel_size": 1}
        arguments = arguments | {"speculative_config": own}
    ranked = serve_on_ranks(arguments, {"trees": run})["trees"]
    found = mismatches(run, ranked.result, plain)
    assert not found, explain(found)
    first, second = ranked.traces
    assert first == second
    assert sum(len(step["accepted"]) for step in first) > len(run.requests)
