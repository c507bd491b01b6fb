"""Run `soak` for three minutes, and see that it would fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import soak
from engine_process import Request
from soak_clients import Log, Received

pytestmark = pytest.mark.e2e

CLIENTS = 32


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_under_many_clients_stays_exact_and_alive(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Such a short soak still fills vLLM's caches. A leak per step or request would gain more."""
    warm_up = 60
    soaked = soak.run(tmp_path, 170, CLIENTS, repeat=600)
    found = soak.failures(soaked, warm_up, most_growth=250)
    assert not found, soaked.report(warm_up)
    assert soaked.log.aborted > 0
    assert soaked.log.restarts > 0
    assert soaked.repeated > 50
    tell("soak: " + "; ".join(soaked.report(warm_up).splitlines()[:2]))


def test_a_wrong_token_is_seen_and_a_beginning_is_none() -> None:
    def received(tokens: list[int], aborted: bool) -> Received:
        return Received(Request("", {}), [tokens], aborted)

    assert not soak.differs(received([1, 2, 3], aborted=False), [[1, 2, 3]])
    assert not soak.differs(received([1, 2], aborted=True), [[1, 2, 3]])
    assert soak.differs(received([1, 2], aborted=False), [[1, 2, 3]])
    assert soak.differs(received([1, 4], aborted=True), [[1, 2, 3]])


def test_a_growing_process_is_seen() -> None:
    growing = soak.Samples({"worker": [(s, 500 + s) for s in range(0, 900, 5)]})
    steady = soak.Samples({"worker": [(s, 500 + s % 20) for s in range(0, 900, 5)]})
    bound = soak.MOST_GROWTH
    assert growing.growth(soak.WARM_UP_SECONDS)["worker"] > bound
    assert abs(steady.growth(soak.WARM_UP_SECONDS)["worker"]) < bound


def test_counters_that_do_not_add_up_are_seen() -> None:
    log = Log([Received(Request("", {}), [[1, 2, 3]])])
    metrics = {"vllm:generation_tokens_total": 2.0, "vllm:num_preemptions_total": 0.0}
    found = soak.faults(log, metrics, check=lambda metrics: None)
    assert len(found) == 2
