"""Watch an engine's steps from inside its process: host, device, and kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch

HOW = ("host", "floor", "kernels")
"""host: the host's time by function, and starved steps, before which the device was idle. floor:
the device's time, if the host is ahead. kernels: what the device runs, and its gaps."""

HEAD_START_CYCLES = 100_000_000
"""About 50 ms, in which the host launches a whole step."""
KERNELS = 30
"""Kernels that are listed, by their time."""

_OF_SCHEDULER = ("schedule", "update_from_output")
_OF_WORKER = ("execute_model", "sample_tokens")


class Watch:
    """Watches from its making to `end`, in one of the ways of `HOW`."""

    def __init__(self, worker: Any, scheduler: Any, how: str) -> None:
        self._how = how
        self._steps = self._starved = 0
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._cuda = torch.cuda.is_available()
        self._events: list[Any] = []
        self._wrapped = [(scheduler, each) for each in _OF_SCHEDULER]
        self._wrapped += [(worker, each) for each in _OF_WORKER]
        for owner, name in self._wrapped:
            setattr(owner, name, self._watched(getattr(owner, name), name))
        self._profiler: Any = None
        if how == "kernels" and self._cuda:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            self._profiler.start()

    def end(self) -> dict[str, Any]:
        """Stop watching, and return what was seen, in milliseconds per step."""
        for owner, name in self._wrapped:
            delattr(owner, name)
        steps = max(1, self._steps)
        found: dict[str, Any] = {"steps": self._steps}
        if self._how == "host":
            found["host_ms"] = {
                name: {"wall": 1e3 * wall / steps, "cpu": 1e3 * cpu / steps}
                for name, (wall, cpu) in self._seconds.items()
            }
            found["starved_steps"] = self._starved if self._cuda else None
        if self._how == "floor" and self._events:
            torch.cuda.synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=False)
            found["floor_ms"] = median(begin.elapsed_time(end) for begin, end in pairs)
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.stop()
            found |= _kernels(self._profiler.events(), steps)
        return found

    def _watched(self, stock: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "execute_model":
                self._begin()
            wall, cpu = time.perf_counter(), time.thread_time()
            result = stock(*args, **kwargs)
            spent = self._seconds[name]
            spent[0] += time.perf_counter() - wall
            spent[1] += time.thread_time() - cpu
            if name == "sample_tokens":
                self._mark()
            return result

        return call

    def _begin(self) -> None:
        self._steps += 1
        # The end of the step before is behind the device: it had nothing to do.
        if self._how == "host" and self._events:
            self._starved += self._events.pop().query()
        if self._how == "floor" and self._cuda:
            if len(self._events) % 2:  # the step before had no sampling
                self._events.pop()
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            self._mark()

    def _mark(self) -> None:
        if self._cuda and self._how != "kernels":
            event = torch.cuda.Event(enable_timing=self._how == "floor")  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)


def _kernels(events: Any, steps: int) -> dict[str, Any]:
    """Sum up the device's work by name, and its gaps: of all time that it was idle in between."""
    every = [each for each in events if each.device_type.name == "CUDA"]
    by_name: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy, gaps, until = 0.0, 0.0, None
    for each in sorted(every, key=lambda each: each.time_range.start):
        begin, end = each.time_range.start, each.time_range.end
        by_name[each.name][0] += 1
        by_name[each.name][1] += end - begin
        gaps += max(0.0, begin - until) if until is not None else 0.0
        busy += max(0.0, end - max(begin, until or begin))
        until = max(end, until or end)
    longest = sorted(by_name.items(), key=lambda item: -item[1][1])[:KERNELS]
    return {
        "busy_ms": busy / 1e3 / steps,
        "gap_ms": gaps / 1e3 / steps,
        "kernels": [
            {"name": name[:120], "launches": count / steps, "ms": spent / 1e3 / steps}
            for name, (count, spent) in longest
        ],
    }
