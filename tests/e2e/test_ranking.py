"""Drafts know the requests' parameters: more of a tree is accepted. `test_identity` has the
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import workload
from comparison import accepted_per_step
from engine_process import Result

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]


@pytest.mark.parametrize("name", workload.GAINS)
def test_a_draft_that_knows_the_parameters_gains_tokens_per_step(
    name: str, served: Served, tell: Callable[[str], None]
) -> None:
    """The same requests with the same seeds, once with the draft's own ranking."""
    off, on = (1 + accepted_per_step(served("fixed")[each]) for each in (f"{name} off", name))
    tell(f"tokens per step at temperature 1 with {name}: {off:.2f} without ranking, {on:.2f} with")
    assert on >= workload.GAINS[name][1] * off


def _reached(result: Result) -> float:
    """Return the accepted part of the trees' depths."""
    reached = result.metrics["vllm:dyntree_accepted_path_tokens_sum"]
    return reached / result.metrics["vllm:dyntree_tree_depth_sum"]


@pytest.mark.parametrize("name", workload.OF_TWIN)
def test_without_the_parameters_a_twin_is_accepted_less(
    name: str, served: Served, tell: Callable[[str], None]
) -> None:
    """Control: with them, a draft that is the target is accepted to the last level
    (`test_sources`)."""
    on, off = (_reached(served("twin")[each]) for each in (name, f"{name} off"))
    tell(f"{name}: {on:.3f} of a twin's depth is accepted, {off:.3f} without ranking")
    assert off < 0.97
