"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

STAGES = ("target", "sample", "walk", "move", "draft", "grow")
"""target: the target's forward; sample: its sampler on all rows; walk: matching samples against
the tree; move: KV of the accepted path; draft: draft forwards; grow: the rest of drafting."""

DRAFTING = ("draft", "grow")
"""The stages whose time does not depend on the rows that are verified."""

TREE, PLAIN = "tree", "plain"
"""The two ways to decode that a step's time is compared between: as it was, and as it is estimated
for the target alone."""


class StageTimes(Protocol):
    """One step's seconds by stage, which a device may still be spending."""

    def ready(self) -> bool:
        """Whether they are known; never waits."""
        ...

    def seconds(self) -> dict[str, float]:
        """By stage; waits until they are known."""
        ...


class Clock(Protocol):
    """Splits the time of a step into stages. A stage within another pauses it."""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.start(stage)
        try:
            yield
        finally:
            self.stop()

    def start(self, stage: str) -> None: ...

    def stop(self) -> None:
        """End the innermost stage, if any."""
        ...

    def split(self) -> StageTimes:
        """The times since the last call. Ends whatever still runs."""
        ...


@dataclass(frozen=True)
class Measured:
    """Times of calls that have returned."""

    by_stage: dict[str, float]

    def ready(self) -> bool:
        return True

    def seconds(self) -> dict[str, float]:
        return self.by_stage


class StageClock(Clock):
    """Adds up wall seconds by stage until they are taken. A stage within another pauses it.

    Right where calls are synchronous, as they are on the CPU.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._running: list[str] = []
        self._since = 0.0

    def start(self, stage: str) -> None:
        self._credit()
        self._running.append(stage)

    def stop(self) -> None:
        self._credit()
        if self._running:
            self._running.pop()

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call. Ends whatever still runs."""
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
