"""Look-up beside a draft model or alone. `test_identity` has the tokens; here are controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import workload
from comparison import accepted_per_step
from engine_process import Result
from slow import marked

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]


@pytest.mark.parametrize("engine", marked(workload.LOOK_UP, workload.SLOW_ENGINES))
def test_no_draft_forward_is_made_without_a_draft_model(engine: str, served: Served) -> None:
    """Control: with one there are some."""
    forwards = "vllm:dyntree_draft_forwards_total"
    assert served(engine)["sample"].metrics[forwards] == 0
    assert served("fixed")["sample"].metrics[forwards] > 0


@pytest.mark.slow
def test_a_tiny_cache_preempts_requests_that_look_up(served: Served) -> None:
    """The texts of preempted requests are written anew when they come back."""
    metrics = served("tight look-up")["demanding"].metrics
    assert metrics["vllm:num_preemptions_total"] > 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.slow
def test_what_is_looked_up_is_accepted(served: Served, tell: Callable[[str], None]) -> None:
    """Control: guesses are hardly ever."""
    looked_up = served("look-up")
    alone, guesses = (accepted_per_step(looked_up[name]) for name in ("acceptance", "guesses"))
    both, draft = (
        accepted_per_step(served(name)["acceptance"]) for name in ("fixed", "draft alone")
    )
    tell(
        f"accepted nodes per step with 16 nodes at temperature 1: look-up {alone:.2f} "
        f"(guesses {guesses:.2f}), draft {draft:.2f}, both {both:.2f}"
    )
    assert alone > 5 * guesses
    assert both > 0.97 * draft
