"""What drafts: a draft model, look-up, several drafts, a head. `test_identity` has the tokens; here
is what is accepted, and what a broken mechanism costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import sabotage
import workload
from comparison import accepted_per_step
from engine_process import Result
from slow import marked

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]

OF_TWINS = [
    (engine, name)
    for engine in ("twin", "tight twin")
    for name, run in workload.ENGINES[engine][1].items()
    if run.sabotage != "unranked"
]


@pytest.mark.parametrize(("engine", "name"), marked(OF_TWINS, workload.SLOW_ENGINES))
def test_a_draft_that_is_the_target_is_accepted_to_the_last_level(
    engine: str, name: str, served: Served
) -> None:
    """Wrong KV, positions, masks, noise or parameters on the draft's side would lower it."""
    result = served(engine)[name]
    reached = result.metrics["vllm:dyntree_accepted_path_tokens_sum"]
    deepest = result.metrics["vllm:dyntree_tree_depth_sum"]
    assert deepest > 50
    assert reached >= 0.99 * deepest


def test_a_tree_step_yields_several_tokens_at_temperature_0(
    served: Served, tell: Callable[[str], None]
) -> None:
    tokens = 1 + accepted_per_step(served("fixed")["greedy"])
    tell(f"tokens per target step at temperature 0 with 16 nodes: {tokens:.2f}")
    assert tokens >= 2.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "least", "other", "name"),
    [
        ("look-up", 5.0, "look-up", "guesses"),
        ("fixed", 0.97, "draft alone", "acceptance"),
        ("draft alone", 1.4, "uncoupled", "acceptance"),
        ("pool", 0.95, "fixed", "acceptance"),
    ],
)
def test_a_source_is_accepted_more_than_another(
    engine: str, least: float, other: str, name: str, served: Served, tell: Callable[[str], None]
) -> None:
    """Control of look-up: guesses are hardly ever accepted."""
    found = accepted_per_step(served(engine)["acceptance"])
    of_other = accepted_per_step(served(other)[name])
    tell(f"accepted nodes per step: {found:.2f} ({engine}), {of_other:.2f} ({other}, {name})")
    assert found > least * of_other


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["merged", "head", "head alone", *workload.OF_GROWTHS])
def test_what_is_drafted_is_accepted(engine: str, served: Served) -> None:
    name, least = ("greedy", 0) if engine in workload.OF_GROWTHS else ("acceptance", 1)
    assert accepted_per_step(served(engine)[name]) > least


@pytest.mark.parametrize("engine", marked(workload.LOOK_UP, workload.SLOW_ENGINES))
def test_no_draft_forward_is_made_without_a_draft_model(engine: str, served: Served) -> None:
    """Control: with one there are some."""
    forwards = "vllm:dyntree_draft_forwards_total"
    assert served(engine)["sample"].metrics[forwards] == 0
    assert served("fixed")["sample"].metrics[forwards] > 0


@pytest.mark.parametrize("name", sabotage.OF_HEADS)
def test_what_a_head_reads_matters(name: str, served: Served) -> None:
    """Control of the identity under the same sabotage."""
    sound, broken = (accepted_per_step(served("head")[run]) for run in ("after the sabotage", name))
    assert broken < 0.97 * sound


def test_a_prefix_hit_leaves_out_the_last_block_of_a_head(served: Served) -> None:
    """The head's last row of a cached prefix depends on the token after it."""
    cached = {
        engine: [each.cached for each in served(engine)["warm"].outputs if each]
        for engine in ("tree", "head")
    }
    assert 0 < sum(cached["head"]) < sum(cached["tree"])
