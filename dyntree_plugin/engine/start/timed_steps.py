"""Timed steps of the target alone, before the engine serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.clock import Clock
from dyntree_plugin.engine.step.trees import TreeStore


class TimedRunner(Protocol):
    """The parts of a model runner that run and time steps."""

    model: Any
    sampler: Any
    speculator: Any
    input_buffers: Any
    trees: TreeStore
    clock: Clock
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    decode_query_len: int

    def queue_delay(self) -> None: ...

    def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any: ...


class Seconds(NamedTuple):
    """Seconds of a whole step, and of its forward."""

    whole: float
    forward: float


def most_rows(runner: TimedRunner) -> int:
    """Return the rows of the largest decode step: a request's rows fit into its context."""
    of_request = min(runner.trees.shape.node_budget + 1, runner.max_model_len)
    return min(runner.max_num_reqs * of_request, runner.max_num_tokens)


@contextmanager
def without_drafting(runner: TimedRunner) -> Iterator[None]:
    """Let the runner's steps draft nothing."""
    drafting: Any = runner
    drafting.speculator, speculator = None, runner.speculator
    try:
        yield
    finally:
        runner.speculator = speculator


def seconds_of(
    runner: TimedRunner,
    forward: Callable[[], torch.Tensor | None],
    sample: Callable[[torch.Tensor], object],
) -> Seconds:
    """Time one step: ``forward`` returns hidden states, ``sample`` takes them.

    Raises:
        RuntimeError: if there are no hidden states.
    """
    runner.clock.split()
    runner.queue_delay()
    hidden = forward()
    if hidden is None:
        raise RuntimeError("this worker does not hold the last layer of the model")
    with runner.clock("sample"):
        sample(hidden)
    spent = runner.clock.split().seconds()
    whole = sum(spent.values())
    return Seconds(whole, whole - spent["sample"])


def sample_greedily(runner: TimedRunner, requests: int) -> None:
    """Make the first slots sample greedily, whatever vLLM's warm-up left there."""
    for slot in range(requests):
        runner.sampler.add_request(slot, SamplingParams(temperature=0.0))
    runner.sampler.apply_staged_writes()


@torch.inference_mode()
def sample_plain(runner: TimedRunner, hidden: torch.Tensor) -> None:
    """Sample one token of each row as a plain step does.

    Since 0.33 vLLM's warm-up, ``_dummy_sampler_run``, samples a second time with every option on.
    """
    rows = hidden.shape[0]
    batch = InputBatch.make_dummy(rows, rows, runner.input_buffers)
    runner.sampler(runner.model.compute_logits(hidden), batch)
