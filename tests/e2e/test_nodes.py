"""With ranks on two nodes, over vLLM's own processes or over Ray, the tokens stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import Outputs, accepted_per_step, by_request, explain, mismatches
from engine_process import Result, Run, serve
from nodes import LINKS, serve_on_nodes
from ranks import Ranked, serve_on_ranks
from stages import serve_in_stages

BROKEN_STAGE = "without_paths_of_earlier_stages"

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = workload.each_kind(range(24))
RUNS = {"trees": Run(REQUESTS), "without_kv_move": Run(REQUESTS, sabotage="without_kv_move")}
STAGES = {
    "trees": Run(REQUESTS),
    BROKEN_STAGE: Run(REQUESTS, sabotage=BROKEN_STAGE),
}
HOW = (*LINKS, "ray")


@pytest.fixture(scope="module")
def plain_tokens() -> Outputs:
    run = Run(REQUESTS)
    return by_request(run, serve(workload.without_tree(), {"all": run}, threads=1)["all"])


def _on_two_nodes(
    how: str, engine: Mapping[str, Any], runs: Mapping[str, Run], folder: Path, start: Any
) -> Any:
    """Work through the runs with one rank on each node; ``start`` as in `serve_on_nodes`."""
    if how == "ray":
        return _over_ray(engine, runs, start)
    with LINKS[how]() as nodes:
        return serve_on_nodes(nodes, engine, runs, folder, start)


def _over_ray(engine: Mapping[str, Any], runs: Mapping[str, Run], start: Any) -> Any:
    pytest.importorskip("ray", reason="ray is not installed")
    import ray_on_cpu

    path = {"PYTHONPATH": str(Path(__file__).parent)}
    executor = {"distributed_executor_backend": ray_on_cpu.EXECUTOR}
    with ray_on_cpu.cluster(2) as address:
        return start({**engine, **executor}, runs, RAY_ADDRESS=address, **path)


@pytest.fixture(scope="module", params=HOW)
def ranked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ranked]:
    engine, folder = workload.tree() | {"tensor_parallel_size": 2}, tmp_path_factory.mktemp("ranks")
    found: dict[str, Ranked] = _on_two_nodes(request.param, engine, RUNS, folder, serve_on_ranks)
    return found


@pytest.fixture(scope="module", params=HOW)
def piped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    engine = workload.tree() | {"pipeline_parallel_size": 2}
    folder = tmp_path_factory.mktemp("stages")
    found: dict[str, Result] = _on_two_nodes(request.param, engine, STAGES, folder, serve_in_stages)
    return found


def test_ranks_on_two_nodes_give_the_tokens_of_one_without_trees(
    ranked: dict[str, Ranked], plain_tokens: Outputs
) -> None:
    found = mismatches(RUNS["trees"], ranked["trees"].result, plain_tokens)
    assert not found, explain(found)
    assert ranked["trees"].result.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_ranks_on_two_nodes_see_the_same_trees(ranked: dict[str, Ranked]) -> None:
    first, second = ranked["trees"].traces
    assert first == second
    assert sum(len(step["accepted"]) for step in first) > len(REQUESTS)


def test_without_moves_of_kv_on_the_second_node_the_tokens_differ(
    ranked: dict[str, Ranked], plain_tokens: Outputs
) -> None:
    assert mismatches(RUNS["without_kv_move"], ranked["without_kv_move"].result, plain_tokens)


def test_stages_on_two_nodes_give_the_tokens_of_one_without_trees(
    piped: dict[str, Result], plain_tokens: Outputs
) -> None:
    found = mismatches(STAGES["trees"], piped["trees"], plain_tokens)
    assert not found, explain(found)
    assert accepted_per_step(piped["trees"]) > 2


def test_a_stage_on_another_node_that_misses_the_paths_changes_tokens(
    piped: dict[str, Result], plain_tokens: Outputs
) -> None:
    assert mismatches(STAGES[BROKEN_STAGE], piped[BROKEN_STAGE], plain_tokens)
