"""The clock that splits a step's time into stages."""

from __future__ import annotations

import pytest

from dyntree_plugin.engine.step import clock
from dyntree_plugin.engine.step.clock import STAGES, StageClock


class Time:
    """Replace the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(clock, "time", fake)
    return fake


def spent(clock: StageClock) -> dict[str, float]:
    return {stage: seconds for stage, seconds in clock.take().items() if seconds}


def test_a_stage_within_another_pauses_it(time: Time) -> None:
    clock = StageClock()
    with clock("catch_up"):
        time.now += 1
        with clock("draft"):
            time.now += 10
        time.now += 2
        with clock("draft"):
            time.now += 20
        time.now += 4
    assert spent(clock) == {"catch_up": 7, "draft": 30}


def test_leaving_a_stage_ends_the_one_that_took_its_place(time: Time) -> None:
    clock = StageClock()
    with clock("target"):
        with clock("verify"):
            time.now += 1
            clock.next("draft")
            time.now += 10
        time.now += 100
    time.now += 1000
    assert spent(clock) == {"verify": 1, "draft": 10, "target": 100}


def test_taking_ends_what_runs_and_starts_again_from_zero(time: Time) -> None:
    clock = StageClock()
    clock.start("target")
    time.now += 3
    assert clock.take() == dict.fromkeys(STAGES, 0.0) | {"target": 3}
    time.now += 3
    assert spent(clock) == {}
