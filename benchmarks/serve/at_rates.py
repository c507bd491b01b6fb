"""What a measurement adds to an engine's process, by vLLM's ``worker_extension_cls``.

With random weights nothing is accepted. vLLM's chains have ``rejection_sample_method: synthetic``
for that; here trees get the same, and both get the rates that a load names. A load also names how
many draft tokens a step has, so that one engine serves chains of every length, or trees of every
size. The scheduler runs in the worker's process, as there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.model_executor.model_loader import dummy_loader
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.serve.watching import Watch
from dyntree_plugin.engine.budget.by_schedule import NodeBuckets
from dyntree_plugin.engine.step.verify import TreeVerifier
from dyntree_plugin.tree.budget.learned import Chosen

WEIGHTS = 0.5
"""Largest random weight. With vLLM's 0.001 the logits are flat, and trees grow no deeper nodes."""


class Told:
    """What the running load asks for.

    ``tokens``: draft tokens of a request's step; None leaves them to the engine. ``rates`` [depths]
    on the device: the chance that a draft is accepted if those above are; None: none is made up.
    """

    tokens: int | None = None
    rates: torch.Tensor | None = None
    scheduler: Any = None


def accepted(
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    rates: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    """Let the target have ``sampled`` int64 [R, N + 1] the first child of a row, by chance.

    ``tokens`` [R, N + 1]: of the rows. ``parents`` [R, N]: of the nodes, -1 for the root.
    ``depths`` [R, N + 1]: the root's is 0. ``draws`` [R, N + 1]: uniform. The child of a row is
    accepted where the draw is below the rate of the row's depth, and past the last rate never.
    """
    nodes = parents.shape[1]
    at = torch.arange(nodes, device=parents.device).expand_as(parents)
    first = torch.full_like(sampled, nodes).scatter_reduce(1, parents + 1, at, "amin")
    child = tokens.long().gather(1, first.clamp(max=nodes - 1) + 1)
    chance = torch.nn.functional.pad(rates, (0, 1))[depths.clamp(max=len(rates))]
    return torch.where((first < nodes) & (draws < chance), child, sampled)


def _with_rates(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def sample(self: TreeVerifier, logits: torch.Tensor, batch: Any, *given: Any) -> Any:
        sampled, processed = stock(self, logits, batch, *given)
        requests, rows = batch.num_reqs, batch.num_tokens
        lengths = np.diff(batch.cu_num_logits_np[: requests + 1])
        nodes = int(lengths[0]) - 1
        if Told.rates is None or nodes < 1 or len(sampled) != rows or np.ptp(lengths):
            return sampled, processed
        tokens, positions, drawn = (
            each[:rows].view(requests, -1) for each in (batch.input_ids, batch.positions, sampled)
        )
        parents = self.trees.parents[batch.idx_mapping[:requests].long(), :nodes]
        draws = torch.rand(drawn.shape, device=drawn.device)
        depths = positions - positions[:, :1]
        found = accepted(drawn.long(), tokens, parents, depths, Told.rates, draws)
        return found.view(-1).to(sampled.dtype), processed

    return sample


def _with_told_size(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def choose(self: NodeBuckets, requests: int) -> Chosen:
        if Told.tokens is None:
            chosen: Chosen = stock(self, requests)
            return chosen
        return Chosen(min(self._most, max(0, Told.tokens - 1)), Told.tokens)

    return choose


class _ToldLength:
    """Answers vLLM's scheduler, which asks a table for the drafts of so many requests."""

    def __getitem__(self, requests: int) -> int:
        return Told.tokens or 0


def _known(stock: Callable[..., None]) -> Callable[..., None]:
    @wraps(stock)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        Told.scheduler = self
        if self.dynamic_sd_lookup is not None:  # A scheduler of trees replaces it again.
            self.dynamic_sd_lookup = _ToldLength()

    return start


def _larger(stock: Callable[..., None]) -> Callable[..., None]:
    return lambda weight: stock(weight, -WEIGHTS, WEIGHTS)


for _owner, _name, _changed in (
    (TreeVerifier, "_sample", _with_rates),
    (NodeBuckets, "_choose", _with_told_size),
    (Scheduler, "__init__", _known),
    (dummy_loader, "initialize_single_dummy_weight", _larger),
):
    setattr(_owner, _name, _changed(getattr(_owner, _name)))


class MeasuredWorker:
    """Methods that vLLM gives to its worker."""

    def begin_load(
        self, tokens: int | None, rates: Sequence[float] | None, watched: str | None = None
    ) -> None:
        """Take what a load asks for, as in `Told`. ``watched``: one of `watching.HOW`."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        Told.tokens = tokens
        Told.rates = None if rates is None else torch.tensor(rates, device=runner.device)
        of_chain = getattr(runner.rejection_sampler, "synthetic_conditional_rates", None)
        if of_chain is not None:
            own = torch.zeros_like(of_chain)
            own[: len(rates or ())] = torch.tensor(rates or (), device=own.device)[: len(own)]
            of_chain.copy_(own)
        self._watch = Watch(self, Told.scheduler, watched) if watched else None

    def end_load(self) -> dict[str, Any] | None:
        """Return what was watched."""
        return self._watch.end() if self._watch else None
