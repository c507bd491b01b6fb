"""What a step without speculation costs, measured before the engine serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

if TYPE_CHECKING:
    from dyntree_plugin.engine.runner import TreeRunnerMixin

CONTEXT = 256
"""Tokens that every request of a measured step has behind it, or as many as the model allows."""
REPETITIONS = 5


@dataclass(frozen=True)
class PlainCost:
    """Seconds of the target's forward and sampler with one row for each of so many requests.

    ``requests``: ascending numbers. Between them the cost is interpolated.
    """

    requests: tuple[int, ...]
    measured: tuple[float, ...]

    def seconds(self, requests: int) -> float:
        return float(np.interp(requests, self.requests, self.measured))


def measure(runner: TreeRunnerMixin) -> PlainCost:
    """Time plain decode steps of 1, 2, 4, … up to as many requests as the engine takes at once.

    Call it when the KV cache is there and no request has come yet: the steps write into it.
    """
    most = min(runner.max_num_reqs, runner.max_num_tokens)
    sizes = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
    with mock.patch.object(runner, "speculator", None):
        _step(runner, most)
        return PlainCost(tuple(sizes), tuple(_usual(runner, size) for size in sizes))


def _usual(runner: TreeRunnerMixin, requests: int) -> float:
    return float(np.median([_step(runner, requests) for _ in range(REPETITIONS)]))


def _step(runner: TreeRunnerMixin, requests: int) -> float:
    runner.clock.take()
    _, hidden = runner._dummy_run(requests, context_len=CONTEXT)
    if hidden is None:
        raise RuntimeError("this worker does not hold the last layer of the model")
    with runner.clock("sample"):
        runner._dummy_sampler_run(hidden)
    return sum(runner.clock.take().values())
