"""The clock of a device that works asynchronously to the host."""

from __future__ import annotations

import pytest

from dyntree_plugin.engine.cuda.clock import EventClock, EventTimes


class Device:
    """A device that works only when it is told to; ``waits`` counts how often the host waited."""

    def __init__(self) -> None:
        self.given = 0.0
        self.done = 0.0
        self.waits = 0
        self.events = 0
        self.capturing = False

    def work(self, milliseconds: float) -> None:
        self.given += milliseconds

    def event(self) -> Event:
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = float("nan")

    def record(self, stream: Device) -> None:
        assert stream is self.device
        self.at = self.device.given

    def query(self) -> bool:
        return self.at <= self.device.done

    def synchronize(self) -> None:
        self.device.waits += not self.query()
        self.device.done = max(self.device.done, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return end.at - self.at


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def clock(device: Device) -> EventClock:
    return EventClock(device.event, lambda: device.capturing, lambda: device)


def step(clock: EventClock, device: Device) -> EventTimes:
    device.work(5)
    clock.start("target")
    device.work(10)
    clock.stop()
    with clock("catch_up"):
        device.work(1)
        with clock("draft"):
            device.work(20)
        device.work(2)
    device.work(7)
    return clock.split()


def spent(times: EventTimes) -> dict[str, float]:
    return {name: value for name, value in times.seconds().items() if value}


def test_a_stage_within_another_pauses_it_and_the_rest_counts_nowhere(
    clock: EventClock, device: Device
) -> None:
    times = step(clock, device)
    assert spent(times) == pytest.approx({"target": 0.01, "catch_up": 0.003, "draft": 0.02})


def test_a_stage_that_takes_anothers_place_costs_one_mark(
    clock: EventClock, device: Device
) -> None:
    clock.start("target")
    for stage in ("sample", "verify"):
        device.work(10)
        clock.next(stage)
        device.work(2)
    clock.stop()
    device.work(7)
    assert spent(clock.split()) == pytest.approx({"target": 0.01, "sample": 0.012, "verify": 0.002})
    assert device.events == 4


def test_a_stage_that_goes_on_costs_no_mark(clock: EventClock, device: Device) -> None:
    clock.start("sample")
    for _ in range(3):
        device.work(10)
        clock.next("verify")
    device.work(10)
    assert spent(clock.split()) == pytest.approx({"sample": 0.01, "verify": 0.03})
    assert device.events == 3


def test_asking_whether_times_are_there_does_not_wait(clock: EventClock, device: Device) -> None:
    times = step(clock, device)
    assert not times.ready()
    device.done = device.given
    assert times.ready()
    spent(times)
    assert device.waits == 0


def test_asking_for_times_too_early_waits(clock: EventClock, device: Device) -> None:
    spent(step(clock, device))
    assert device.waits == 1


def test_events_that_were_read_are_used_again(clock: EventClock, device: Device) -> None:
    for _ in range(10):
        spent(step(clock, device))
    made = device.events
    kept = [step(clock, device) for _ in range(2)]
    assert device.events == 2 * made
    assert [spent(times) for times in kept] == [spent(kept[0])] * 2


def test_nothing_is_marked_while_a_graph_is_captured(clock: EventClock, device: Device) -> None:
    device.capturing = True
    with clock("draft"):
        device.work(3)
    device.capturing = False
    assert spent(clock.split()) == {}
    assert device.events == 0


def test_a_step_is_recorded_on_the_stream_that_is_current_when_it_begins(device: Device) -> None:
    recorded: list[object] = []

    class On(Event):
        def record(self, stream: object) -> None:
            recorded.append(stream)

    clock = EventClock(lambda: On(device), lambda: False, iter("ab").__next__)
    for _ in range(2):
        step(clock, device)
    half = len(recorded) // 2
    assert recorded == ["a"] * half + ["b"] * half
