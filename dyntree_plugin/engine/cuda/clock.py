"""A clock for a device that runs later than the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from vllm.utils.torch_utils import current_stream

from dyntree_plugin.engine.step.clock import STAGES, Clock


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that the clock uses."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds."""
        ...


def cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class EventClock(Clock):
    """Marks where stages begin in the device's stream, and reads the times when they are done.

    Marks are events on the stream that is current at the first one after a split; none is recorded
    while a graph is captured. The time between two marks includes time in which the device waits
    for the host.
    """

    def __init__(
        self,
        make_event: Callable[[], Event] = cuda_event,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        stream: Callable[[], Any] = current_stream,
    ) -> None:
        self._make_event = make_event
        self._capturing = capturing
        # Left alone, an event asks torch for the current stream. That costs more than recording, as
        # vLLM's function does, so it is asked once between two splits.
        self._stream = stream
        self._recorded_on: Any = None
        # Events cost microseconds to make; those that were read are used again.
        self._free: deque[Event] = deque()
        self._marks: list[tuple[str | None, Event]] = []
        self._running: list[str] = []

    def start(self, stage: str) -> None:
        self._running.append(stage)
        self._mark()

    def next(self, stage: str) -> None:
        if self._running[-1:] != [stage]:
            self._running[-1:] = [stage]
            self._mark()

    def stop(self) -> None:
        if self._running:
            self._running.pop()
            self._mark()

    def split(self) -> EventTimes:
        if self._running:
            self._running.clear()
            self._mark()
        marks, self._marks = self._marks, []
        return EventTimes(marks, self._free)

    def _mark(self) -> None:
        if self._capturing():
            return
        if not self._marks:
            self._recorded_on = self._stream()
        event = self._free.popleft() if self._free else self._make_event()
        event.record(self._recorded_on)
        self._marks.append((self._running[-1] if self._running else None, event))


class EventTimes:
    """Times between marks. Each mark names the stage that begins there."""

    def __init__(self, marks: list[tuple[str | None, Event]], free: deque[Event]) -> None:
        """``free``: takes the events back after they were read."""
        self._marks = marks
        self._free = free
        self._seconds: dict[str, float] | None = None

    def ready(self) -> bool:
        return self._seconds is not None or not self._marks or self._marks[-1][1].query()

    def seconds(self) -> dict[str, float]:
        if self._seconds is not None:
            return self._seconds
        seconds = dict.fromkeys(STAGES, 0.0)
        if self._marks:
            self._marks[-1][1].synchronize()  # sync: ready() says whether it waits
        for (stage, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if stage is not None:
                seconds[stage] += begin.elapsed_time(end) / 1e3
        self._free.extend(event for _, event in self._marks)
        self._marks, self._seconds = [], seconds
        return seconds
