"""With ranks on two nodes, over vLLM's own processes or over Ray, the tokens stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import workload
from comparison import Outputs, by_request, explain, mismatches
from engine_process import Run, serve
from nodes import LINKS, serve_on_nodes
from ranks import Ranked, serve_on_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = workload.each_kind(range(24))
RUNS = {"trees": Run(REQUESTS), "without_kv_move": Run(REQUESTS, sabotage="without_kv_move")}
SHAPES = [(2, 1)]
"""Sizes of tensor and of pipeline parallelism; one rank on each node."""


@pytest.fixture(scope="module")
def plain_tokens() -> Outputs:
    run = Run(REQUESTS)
    return by_request(run, serve(workload.without_tree(), {"all": run}, threads=1)["all"])


@pytest.fixture(
    scope="module",
    params=[(how, shape) for how in (*LINKS, "ray") for shape in SHAPES],
    ids=lambda of: f"{of[0]}-tensor{of[1][0]}-pipeline{of[1][1]}",
)
def ranked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ranked]:
    how, (tensor, pipeline) = request.param
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    engine = workload.tree() | sizes
    if how == "ray":
        return _over_ray(engine)
    with LINKS[how]() as nodes:
        return serve_on_nodes(nodes, engine, RUNS, tmp_path_factory.mktemp(how))


def _over_ray(engine: dict[str, object]) -> dict[str, Ranked]:
    pytest.importorskip("ray", reason="ray is not installed")
    import ray_on_cpu

    path = {"PYTHONPATH": str(Path(__file__).parent)}
    executor = {"distributed_executor_backend": ray_on_cpu.EXECUTOR}
    with ray_on_cpu.cluster(2) as address:
        return serve_on_ranks(engine | executor, RUNS, RAY_ADDRESS=address, **path)


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
