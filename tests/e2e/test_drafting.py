"""Drafting is worth its cost and predicts what it should. Output does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import workload
from comparison import accepted_per_step
from engine_process import Result
from slow import marked

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        [
            (engine, name)
            for engine in ("twin", "tight twin")
            for name, run in workload.ENGINES[engine][1].items()
            if run.sabotage != "unranked"
        ],
        workload.SLOW_ENGINES,
    ),
)
def test_a_draft_that_is_the_target_is_accepted_to_the_last_level(
    engine: str, name: str, served: Served
) -> None:
    """Wrong KV, positions, masks, noise or parameters on the draft's side would lower it."""
    result = served(engine)[name]
    reached = result.metrics["vllm:dyntree_accepted_path_tokens_sum"]
    deepest = result.metrics["vllm:dyntree_tree_depth_sum"]
    assert deepest > 50
    assert reached >= 0.99 * deepest


@pytest.mark.slow
def test_coupled_drafting_gains_accepted_tokens_at_temperature_1(
    served: Served, tell: Callable[[str], None]
) -> None:
    coupled, uncoupled, chain = (
        accepted_per_step(served(engine)["acceptance"])
        for engine in ("draft alone", "uncoupled", "chain")
    )
    tell(
        "accepted draft tokens per step at temperature 1 with 16 nodes: "
        f"coupled tree {coupled:.2f}, uncoupled tree {uncoupled:.2f} "
        f"({coupled / uncoupled:.2f}x), coupled chain {chain:.2f}"
    )
    assert coupled >= 1.4 * uncoupled


def test_a_tree_step_yields_several_tokens_at_temperature_0(
    served: Served, tell: Callable[[str], None]
) -> None:
    tokens = 1 + accepted_per_step(served("fixed")["greedy"])
    tell(f"tokens per target step at temperature 0 with 16 nodes: {tokens:.2f}")
    assert tokens >= 2.5
