"""Heads of the target. `test_identity` has the tokens; here is what a broken mechanism costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import sabotage
import workload
from comparison import accepted_per_step
from engine_process import Result

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]


@pytest.mark.parametrize("name", sabotage.OF_HEADS)
def test_what_a_head_reads_matters(name: str, served: Served) -> None:
    """Control of the identity under the same sabotage."""
    sound, broken = (accepted_per_step(served("head")[run]) for run in ("after the sabotage", name))
    assert broken < 0.97 * sound


@pytest.mark.slow
def test_a_tiny_cache_preempts_requests_whose_trees_a_head_drafts(served: Served) -> None:
    metrics = served("tight head")["demanding"].metrics
    assert metrics["vllm:num_preemptions_total"] > 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_a_prefix_hit_leaves_out_the_last_block(served: Served) -> None:
    """The head's last row of a cached prefix depends on the token after it."""
    cached = {
        engine: [each.cached for each in served(engine)["warm"].outputs if each]
        for engine in ("tree", "head")
    }
    assert 0 < sum(cached["head"]) < sum(cached["tree"])


@pytest.mark.slow
def test_a_head_is_accepted(served: Served, tell: Callable[[str], None]) -> None:
    head, alone, draft = (
        accepted_per_step(served(engine)["acceptance"])
        for engine in ("head", "head alone", "fixed")
    )
    tell(
        f"accepted nodes per step at temperature 1: EAGLE-3 head and look-up {head:.2f}, head "
        f"alone {alone:.2f}, draft and look-up {draft:.2f} (16 nodes)"
    )
    assert min(head, alone) > 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", workload.OF_GROWTHS)
def test_what_a_head_grows_is_accepted(engine: str, served: Served) -> None:
    metrics = served(engine)["greedy"].metrics
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
