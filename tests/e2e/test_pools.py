"""Several drafts, mixed or with a tree each. `test_identity` has the tokens; here are controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import workload
from comparison import Outputs, accepted_per_step, mismatches
from engine_process import Result
from slow import marked

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]


@pytest.mark.parametrize("engine", marked(workload.POOLS, workload.SLOW_ENGINES))
def test_a_broken_mechanism_changes_tokens(engine: str, served: Served, plain: Outputs) -> None:
    run = workload.POOLS[engine][1]["wrong_child"]
    found = mismatches(run, served(engine)["wrong_child"], plain)
    assert any(output.tokens != without.tokens for _, output, without in found)


@pytest.mark.slow
def test_what_several_drafts_propose_is_accepted(
    served: Served, tell: Callable[[str], None]
) -> None:
    pool, merged, one = (
        accepted_per_step(served(engine)["acceptance"]) for engine in ("pool", "merged", "fixed")
    )
    tell(
        f"accepted nodes per step at temperature 1: one draft and look-up {one:.2f}, two drafts "
        f"and look-up {pool:.2f} (16 nodes), SpecInfer's merge {merged:.2f} (20 nodes)"
    )
    assert pool > 0.95 * one
    assert merged > 1
