"""Logits processors of an installed package see a chain for every row of a tree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import engine_process
import pytest
import workload
from comparison import by_request, explain, mismatches
from engine_process import Result, Run, answered, result_of
from row_order import APART

pytestmark = pytest.mark.e2e

RUN = Run(workload.each_kind(range(12)))
BROKEN = Run(RUN.requests, sabotage="not_unrolled")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH with the metadata of a package that registers a processor."""
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "row_order-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: row_order\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.logits_processors]\napart = row_order:Apart\n"
    )
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.getenv("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def results(installed: str) -> dict[str, Result]:
    def serve(engine: dict[str, Any], runs: dict[str, Run]) -> dict[str, Result]:
        found = answered(engine_process.__file__, engine, runs, 1, PYTHONPATH=installed)
        return {name: result_of(result) for name, result in found.items()}

    return {
        **serve(workload.without_tree(), {"plain": RUN}),
        **serve(workload.tree(), {"trees": RUN, "broken": BROKEN}),
    }


def test_tokens_are_those_without_trees_and_trees_are_free(results: dict[str, Result]) -> None:
    found = mismatches(RUN, results["trees"], by_request(RUN, results["plain"]))
    assert not found, explain(found)
    metrics = results["trees"].metrics
    counted = {name for name, steps in metrics.items() if "fallback_steps" in name and steps}
    assert counted <= {"vllm:dyntree_fallback_steps_total{reason=empty_tree}"}
    assert metrics["vllm:dyntree_tree_depth_sum"] < metrics["vllm:dyntree_tree_nodes_sum"]
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_the_rows_of_a_tree_would_change_tokens(results: dict[str, Result]) -> None:
    assert mismatches(BROKEN, results["broken"], by_request(RUN, results["plain"]))


def test_the_processor_does_something(results: dict[str, Result]) -> None:
    for output in results["plain"].outputs:
        assert output is not None
        tokens = output.tokens[0]
        assert len(tokens) > 10
        assert all((a + b) % APART for a, b in zip(tokens, tokens[2:], strict=False))
