"""Sleep on a CPU, where vLLM's worker ignores it, and ways to break what comes after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Have vLLM's worker lose what it loses on CUDA: the KV cache, and at level 2 all weights but
    the buffers of the target and of the first draft."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def sleep(worker: Any, level: int = 1) -> None:
        runner = worker.model_runner
        for cache in runner.kv_caches:
            cache.fill_(3)
        if level < 2:
            return
        speculator = runner.speculator
        known = [each for each in (runner.model, getattr(speculator, "model", None)) if each]
        kept.extend((b, b.clone()) for model in known for b in model.buffers())
        further = [each.model for each in getattr(speculator, "further", ())]
        for model in [*known, *further]:
            for each in [*model.parameters(), *model.buffers()]:
                each.data.fill_(torch.nan if each.is_floating_point() else 0)

    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            for buffer, copy in kept:
                buffer.data.copy_(copy)
            kept.clear()

    with mock.patch.multiple(CPUWorker, sleep=sleep, wake_up=wake_up):
        yield


def learned(runner: Any) -> float:
    """Return how far the weights that value nodes are from those of a new engine."""
    estimate = getattr(runner, "estimate", None)
    if estimate is None:
        return 0.0
    prior = estimate.prior.repeat(len(estimate.weights) // len(estimate.prior), 1)
    return float((estimate.weights - prior).abs().max())


def keeps_values(runner: Any) -> AbstractContextManager[Any]:
    """Keep what was learned of the old weights. Output must not change."""
    return mock.patch.object(runner, "weights_replaced")


def loses_drafts(runner: Any) -> AbstractContextManager[Any]:
    """Leave the drafts to vLLM, which loses their weights. Output must not change."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from dyntree_plugin.engine.worker import TreeWorkerMixin

    return mock.patch.object(TreeWorkerMixin, "sleep", CPUWorker.sleep)
