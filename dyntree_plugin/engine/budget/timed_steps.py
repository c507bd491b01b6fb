"""Steps of the target alone, to be timed before the engine serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dyntree_plugin.engine.runner import TreeRunnerMixin

Agree = Callable[[float], float]
"""Gives the first rank's number to every rank: they run all steps together."""


def most_rows(runner: TreeRunnerMixin) -> int:
    """Rows of the largest step that decodes: no request has more than its context may."""
    of_request = min(runner.trees.shape.node_budget + 1, runner.max_model_len)
    return min(runner.max_num_reqs * of_request, runner.max_num_tokens)


@contextmanager
def without_drafting(runner: TreeRunnerMixin) -> Iterator[None]:
    """Has the runner's steps draft nothing."""
    told: Any = runner
    told.speculator, speculator = None, runner.speculator
    try:
        yield
    finally:
        runner.speculator = speculator


def seconds_of(
    runner: TreeRunnerMixin,
    forward: Callable[[], torch.Tensor | None],
    sample: Callable[[torch.Tensor], object],
) -> float:
    """Time one step: ``forward`` gives hidden states, ``sample`` takes them.

    Raises:
        RuntimeError: where there are none.
    """
    runner.clock.split()
    runner.get_ahead()
    hidden = forward()
    if hidden is None:
        raise RuntimeError("this worker does not hold the last layer of the model")
    with runner.clock("sample"):
        sample(hidden)
    return sum(runner.clock.split().seconds().values())
