"""A clock that splits the time of a step into stages."""

from __future__ import annotations

import time
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Protocol

STAGES = ("place", "target", "sample", "verify", "catch_up", "draft")
"""The stages of a step, in order; they mean the same on every device.

place: positions and mask of the nodes, and attention metadata. target: the target's forward.
sample: its sampler on all rows. verify: the walk through the trees, the move of accepted KV rows,
and learning. catch_up: the draft reads the emitted tokens, or prompts. draft: the draft's forwards
over nodes, and growth.
"""

DRAFTING = ("catch_up", "draft")
"""Stages whose time does not depend on the number of verified rows."""


class StageTimes(Protocol):
    """Seconds of one step by stage. The device may not have finished the step yet."""

    def ready(self) -> bool:
        """Return whether the seconds are known; never waits."""
        ...

    def seconds(self) -> dict[str, float]:
        """Return the seconds by stage; waits until they are known."""
        ...


class Clock(Protocol):
    """Splits the time of a step into stages. A stage within another pauses the outer one."""

    def __call__(self, stage: str) -> Running:
        """Let the stage run while the result is entered."""
        return Running(self, stage)

    def start(self, stage: str) -> None: ...

    def next(self, stage: str) -> None:
        """End the innermost stage, and start another in its place, unless it is that one."""
        ...

    def stop(self) -> None:
        """End the innermost stage, if any."""
        ...

    def split(self) -> StageTimes:
        """Return the times since the last call. Ends every stage that still runs."""
        ...


class Running(ContextDecorator):
    """Starts a stage when entered; ends it, or the one that took its place, when left."""

    def __init__(self, clock: Clock, stage: str) -> None:
        self._clock = clock
        self._stage = stage

    def __enter__(self) -> None:
        self._clock.start(self._stage)

    def __exit__(self, *_: object) -> None:
        self._clock.stop()


@dataclass(frozen=True)
class Measured:
    """Times that are known already."""

    by_stage: dict[str, float]

    def ready(self) -> bool:
        return True

    def seconds(self) -> dict[str, float]:
        return self.by_stage


class StageClock(Clock):
    """Adds up wall seconds by stage. It fits devices whose calls are synchronous, such as a CPU."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._running: list[str] = []
        self._since = 0.0

    def start(self, stage: str) -> None:
        self._credit()
        self._running.append(stage)

    def next(self, stage: str) -> None:
        self.stop()
        self._running.append(stage)

    def stop(self) -> None:
        self._credit()
        if self._running:
            self._running.pop()

    def take(self) -> dict[str, float]:
        """Return seconds by stage since the last call. Ends every stage that still runs."""
        self._credit()
        self._running.clear()
        taken, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return taken

    def split(self) -> StageTimes:
        return Measured(self.take())

    def _credit(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now
