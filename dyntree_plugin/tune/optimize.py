"""Train a model step by step; a run that is killed and continued ends at the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from dyntree_plugin.pair.models import Model, in_dtype
from dyntree_plugin.tune.files import damaged, explained, whole
from dyntree_plugin.tune.shards import Batch, pieces

# Most copies of the trained model on a CPU: each has its share of a step's samples and a thread.
_COPIES = 2

Loss = Callable[[Model, Batch], tuple[torch.Tensor, float]]
"""Takes the trained model and some samples. Returns the sum of the loss over their positions, and
the sum of the positions' weights."""

Optimizers = Callable[[torch.nn.Module], list[torch.optim.Optimizer]]

Report = Callable[[torch.nn.Module, int, float], None]
"""Takes the model, the number of steps so far, and the mean loss of the last step's texts."""


@dataclass(frozen=True)
class Schedule:
    """A warm-up, a constant stretch and a linear decay to zero."""

    steps: int
    peak: float  # learning rate, on AdamW's scale
    rows: int = 8  # samples per step
    warmup: int = 50  # steps
    decay: float = 0.2  # share of the steps

    def rate(self, step: int) -> float:
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / max(self.decay * self.steps, 1.0)
        return self.peak * min(1.0, rising, falling)


@dataclass(frozen=True)
class Checkpoint:
    """A file with the state of a training, written once in ``every`` steps."""

    file: Path
    every: int = 250

    def read(self) -> dict[str, Any] | None:
        """Return the last state; None if there is none."""
        if not self.file.exists():
            return None
        state: dict[str, Any] = torch.load(self.file, map_location="cpu")
        return state

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the last state as `whole` does."""
        with whole(self.file) as part:
            torch.save(state, part)


def working_copies(
    model: Model, dtype: torch.dtype, devices: Sequence[torch.device] | None = None
) -> list[Model]:
    """Return copies to compute with, with weights of ``dtype``: one per GPU or thread."""
    if devices is None:
        devices = [torch.device("cpu")] * min(_COPIES, torch.get_num_threads())
    return [in_dtype(model, dtype).to(device) for device in devices]


def muon_and_adamw(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices between embedding and head, and AdamW for the rest.

    From random weights, the embedded target reaches AdamW's loss of 300 steps in fewer than 200.
    """
    of_muon: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            between = weight.dim() == 2 and not ("embed" in name or "lm_head" in name)
            (of_muon if between else others).append(weight)
    return [
        torch.optim.Muon(of_muon, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def adamw(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW for all weights that are trained."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return [torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)]


def optimize(
    model: Model,
    batches: Iterator[Batch],
    loss: Loss[Model],
    schedule: Schedule,
    *,
    copies: Sequence[Model],
    positions: int | None = None,
    optimizers: Optimizers = muon_and_adamw,
    checkpoint: Checkpoint | None = None,
    report: Report = lambda model, step, loss: None,
) -> Model:
    """Train the fp32 ``model`` through its working ``copies``, and return it.

    Every step splits one of the ``batches`` among the copies, each of which computes up to
    ``positions`` of its share at once. If there is a ``checkpoint``, the run
    continues from it, and skips as many batches. ``report`` is called after every step; it must not
    change the model.

    Raises:
        ValueError: if the checkpoint is damaged, or of another model or a longer schedule.
    """
    running = optimizers(model)
    first = _resume(checkpoint, model, running, schedule.steps)
    for _ in range(first):
        next(batches)
    threads = max(1, torch.get_num_threads() // len(copies))
    pool = ThreadPoolExecutor(len(copies), initializer=torch.set_num_threads, initargs=(threads,))
    with pool:
        for step in range(first, schedule.steps):
            parts = _shares(next(batches), len(copies))
            sums = list(
                pool.map(_gradient, repeat(model), copies, parts, repeat(loss), repeat(positions))
            )
            total, weight = (math.fsum(each) for each in zip(*sums, strict=True))
            _take_gradients(model, copies[: len(parts)], weight)
            for optimizer in running:
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(step)
                optimizer.step()
            report(model, step + 1, total / weight)
            if checkpoint is not None and (step + 1) % checkpoint.every == 0:
                states = [optimizer.state_dict() for optimizer in running]
                state = {"step": step + 1, "model": model.state_dict(), "optimizers": states}
                checkpoint.write(state)
    return model


def _shares(batch: Batch, count: int) -> list[Batch]:
    parts = [tensor.chunk(count) for tensor in batch.values()]
    return [dict(zip(batch, each, strict=True)) for each in zip(*parts, strict=True)]


def _gradient(
    master: Model, working: Model, share: Batch, loss: Loss[Model], positions: int | None
) -> tuple[float, float]:
    """Copy ``master`` to ``working``, and leave the gradient of the loss there."""
    with torch.no_grad():
        for weight, copied in _trained(master, working):
            copied.copy_(weight)
            copied.grad = None
    device = next(working.parameters()).device
    sums = weights = 0.0
    for piece in [share] if positions is None else pieces(share, positions):
        total, weight = loss(working, {name: each.to(device) for name, each in piece.items()})
        total.backward()  # type: ignore[no-untyped-call]
        sums, weights = sums + total.item(), weights + weight
    return sums, weights


def _take_gradients(master: Model, copies: Sequence[Model], weight: float) -> None:
    """Leave the clipped gradient of the mean loss in ``master``."""
    for trained, *parts in _trained(master, *copies):
        sums = [part.grad.to(trained.device, torch.float32) for part in parts]
        trained.grad = torch.stack(sums).sum(0) / weight
    torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)


def _trained(*models: torch.nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield for each trained weight those of all models."""
    for weights in zip(*(model.parameters() for model in models), strict=True):
        if weights[0].requires_grad:
            yield weights


def _resume(
    checkpoint: Checkpoint | None,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    most: int,
) -> int:
    """Restore the last state, if there is one; return the steps so far.

    ``most``: steps of the schedule.
    """
    if checkpoint is None:
        return 0
    with explained(damaged(checkpoint.file)):
        state = checkpoint.read()
        if state is None:
            return 0
        if not 0 < state["step"] <= most:
            raise ValueError(f"it is of step {state['step']}, and there are {most}")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"])
