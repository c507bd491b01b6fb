"""A table that corrects the draft changes what trees hold, and never the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import workload
from comparison import Outputs, mismatches
from engine_process import Result
from slow import marked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Served = Callable[[str], Mapping[str, Result]]
Differing = Callable[[str, str], str]

ADAPTED = marked(workload.ADAPTED, workload.SLOW_ENGINES)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@pytest.mark.parametrize("engine", ADAPTED)
def test_garbage_in_the_table_changes_no_token(engine: str, differing: Differing) -> None:
    assert not (difference := differing(engine, "garbage")), difference


@pytest.mark.parametrize("engine", ADAPTED)
def test_garbage_in_the_table_costs_acceptance(engine: str, served: Served) -> None:
    """Control of the test above: drafting reads the table."""
    broken, sound = (served(engine)[name].metrics[ACCEPTED] for name in ("garbage", "sound"))
    assert 0 < broken < 0.95 * sound


@pytest.mark.parametrize("engine", ADAPTED)
def test_what_was_read_before_is_drafted_better(engine: str, served: Served) -> None:
    """The same requests again; at last with an empty table, and with all else that was learned."""
    result = served(engine)
    often, forgotten = (result[name].metrics[ACCEPTED] for name in ("a third time", "forgotten"))
    assert often > forgotten


@pytest.mark.parametrize("engine", ADAPTED)
def test_a_broken_walk_is_seen(engine: str, served: Served, plain: Outputs) -> None:
    """Control of the identity."""
    found = mismatches(workload.FIXED_RUNS["wrong_child"], served(engine)["wrong_child"], plain)
    assert any(output.tokens != without.tokens for _, output, without in found)
