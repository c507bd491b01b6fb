"""Fit a draft model to its target's distributions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from dyntree_plugin.pair.models import Model
from dyntree_plugin.tune.losses import Compared, compare
from dyntree_plugin.tune.optimize import (
    Checkpoint,
    Loss,
    Optimizers,
    Report,
    Schedule,
    adamw,
    optimize,
    working_copies,
)
from dyntree_plugin.tune.shards import WEIGHTS, Batch, Shards, pieces

_GROUP = 16
"""Steps whose texts are sorted by length, so that a step's texts have similar lengths."""


@dataclass(frozen=True)
class Machine:
    """The ``devices`` of the working copies, None for a CPU, and the type of their weights."""

    devices: tuple[torch.device, ...] | None
    dtype: torch.dtype

    @classmethod
    def present(cls) -> Machine:
        """Return all GPUs, or the CPU, which computes in bfloat16 if it has instructions for it."""
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            return cls(tuple(torch.device("cuda", n) for n in range(count)), torch.bfloat16)
        abilities = torch.cpu.get_capabilities()
        fast = abilities.get("avx512_bf16") or abilities.get("amx_bf16")
        return cls(None, torch.bfloat16 if fast else torch.float32)

    @property
    def main(self) -> torch.device:
        """The device for everything but working copies."""
        return torch.device("cpu") if self.devices is None else self.devices[0]


def epochs(shards: Shards, rows: int, seed: int) -> Iterator[Batch]:
    """Yield batches of ``rows`` texts without end.

    An epoch has every text once, except a rest that is smaller than a batch.

    Raises:
        ValueError: if there are fewer texts than a batch has.
    """
    lengths = shards.lengths
    if len(lengths) < rows:
        raise ValueError(f"rows={rows} must be at most the number of texts, {len(lengths)}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(len(lengths), generator=generator).tolist()
        batches: list[list[int]] = []
        for first in range(0, len(shuffled), rows * _GROUP):
            group = sorted(
                shuffled[first : first + rows * _GROUP], key=lambda number: lengths[number]
            )
            batches += [group[at : at + rows] for at in range(0, len(group) - rows + 1, rows)]
        for number in torch.randperm(len(batches), generator=generator).tolist():
            yield shards.batch(batches[number])


def compared(draft: PreTrainedModel, batch: Batch) -> Compared:
    """Compare a draft with the target at every position of a batch, [B * L]."""
    read: Any = draft(input_ids=batch["tokens"], use_cache=False)
    top = (batch["top_tokens"].flatten(0, 1), batch["top_log_probs"].flatten(0, 1))
    return compare(read.logits.flatten(0, 1), *top)


def draft_loss(draft: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, float]:
    """The `Loss` of a draft model."""
    weights = batch[WEIGHTS].flatten()
    return (weights * compared(draft, batch).loss()).sum(), float(weights.sum())


def fit(
    model: Model,
    shards: Shards,
    loss: Loss[Model],
    schedule: Schedule,
    machine: Machine,
    *,
    seed: int,
    positions: int | None = None,
    optimizers: Optimizers = adamw,
    checkpoint: Checkpoint | None = None,
    report: Report = lambda model, step, loss: None,
) -> Model:
    """Train an fp32 ``model`` on shards, and return it. ``seed`` orders the texts.

    ``positions``: as in `optimize`.
    """
    return optimize(
        model,
        epochs(shards, schedule.rows, seed),
        loss,
        schedule,
        copies=working_copies(model, machine.dtype, machine.devices),
        positions=positions,
        optimizers=optimizers,
        checkpoint=checkpoint,
        report=report,
    )


@torch.inference_mode()
def mean_loss(
    model: Model, shards: Shards, loss: Loss[Model], rows: int, positions: int | None = None
) -> float:
    """Return the mean loss over all texts of some shards, read by ``rows`` or ``positions``."""
    device = next(model.parameters()).device
    total = weight = 0.0
    for start in range(0, len(shards), rows):
        batch = shards.batch(range(start, min(start + rows, len(shards))))
        for piece in [batch] if positions is None else pieces(batch, positions):
            sums, weights = loss(model, {name: each.to(device) for name, each in piece.items()})
            total, weight = total + float(sums), weight + weights
    return total / weight


def with_adapter(draft: PreTrainedModel, rank: int, seed: int) -> Any:
    """Return the draft with trainable low-rank adapters on its linear layers (arXiv 2106.09685)."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(draft, config)
