"""Stages 2 and 3, teach and fit: the target reads its texts, and the draft learns from it."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from dyntree_plugin.commands.engine import text_config_of
from dyntree_plugin.commands.start import fetch
from dyntree_plugin.commands.tune import models
from dyntree_plugin.commands.tune.settings import Folder, Settings, Update, write_json
from dyntree_plugin.commands.tune.write import samples
from dyntree_plugin.tune import fit, teach
from dyntree_plugin.tune.files import damaged, explained
from dyntree_plugin.tune.fit import Machine
from dyntree_plugin.tune.optimize import Checkpoint, Loss, Optimizers, Schedule, adamw
from dyntree_plugin.tune.shards import Shards, positions_at_once, save_tensors

MEASURED = 20
"""Steps between two measurements of the loss of held-out texts, and between two checkpoints."""

WARM_UP = 0.05
DECAY = 0.5
"""Shares of the steps in which the learning rate rises and falls."""


def taught(
    folder: Folder,
    settings: Settings,
    machine: Machine,
    parts: int,
    layers: Sequence[int],
    update: Update,
    keep: Callable[[PreTrainedModel], None] | None = None,
) -> None:
    """Make the missing shards; ``layers`` as in `teach.distributions`.

    ``keep`` is called with the target, and is None if nothing of it has to be kept. The target is
    loaded only if that or a shard is missing.
    """
    waiting = [part for part in range(parts) if not folder.shard(part).exists()]
    update(advance=parts - len(waiting))
    if not waiting and keep is None:
        return
    target = models.target_of(settings.target, settings.dtype, machine)
    vocabulary = text_config_of(settings.target).vocab_size
    if keep is not None:
        keep(target)
    for part in waiting:
        texts = samples(folder, part, vocabulary)
        save_tensors(teach.distributions(target, texts, layers), folder.shard(part))
        update(advance=1)


@dataclass(frozen=True)
class Lessons:
    """The texts of a tuning: to ``learn``, and ``held_out``."""

    folder: Folder
    learn: Shards
    held_out: Shards


def schedule(settings: Settings, texts: int) -> Schedule:
    """Return the schedule of a training on ``texts`` texts."""
    steps = max(1, round(settings.epochs * texts / settings.rows))
    warm_up = max(1, round(WARM_UP * steps))
    return Schedule(steps, settings.rate, settings.rows, warm_up, DECAY)


def fitted(lessons: Lessons, settings: Settings, machine: Machine, update: Update) -> None:
    """Fit the draft and store it."""
    folder, draft = lessons.folder, settings.draft
    start = folder.begun if draft is None else fetch(draft)
    model, dtype = models.draft_of(start, machine)
    vocabulary = model.config.get_text_config().vocab_size
    largest = max(lessons.learn.largest, lessons.held_out.largest)
    if largest >= vocabulary:
        raise ValueError(
            f"--draft {draft!r} has no token {largest}, which the target has written: resize it to "
            "the target's size with transformers' resize_token_embeddings"
        )
    trained: Any = model
    if settings.adapter is not None:
        trained = fit.with_adapter(model, settings.adapter, settings.seed)
    train(lessons, settings, machine, trained, fit.draft_loss, update, vocabulary)
    if settings.adapter is not None:
        trained = trained.merge_and_unload()
    models.save(trained, dtype, start, folder.fitted)


def train(
    lessons: Lessons,
    settings: Settings,
    machine: Machine,
    model: torch.nn.Module,
    loss: Loss[Any],
    update: Update,
    logits: int,
    optimizers: Optimizers = adamw,
) -> None:
    """Train a model on the lessons, and store the curves of its losses.

    ``logits``: how many the loss has in memory for each position.
    """
    folder = lessons.folder
    shards, held_out = lessons.learn, lessons.held_out
    plan = schedule(settings, len(shards))
    every = math.ceil(plan.steps / MEASURED)
    positions = positions_at_once(logits)
    curve = read_curve(folder.losses)
    recent: deque[float] = deque(maxlen=every)

    def measure(model: torch.nn.Module, step: int, learned: float | None) -> None:
        model.eval()
        left = fit.mean_loss(model, held_out, loss, settings.rows, positions)
        curve[step] = (learned, left)
        write_json(folder.losses, sorted((n, *both) for n, both in curve.items()))

    def report(model: torch.nn.Module, step: int, learned: float) -> None:
        # A run that was killed may have measured steps that follow its last checkpoint.
        for ahead in [measured for measured in curve if measured > step]:
            del curve[ahead]
        recent.append(learned)
        if step % every == 0 or step == plan.steps:
            since = max(curve) - step
            measure(model, step, fmean([*recent][since:]))
        measured = max(curve)
        update(
            completed=step,
            note=f"loss {fmean(recent):.3f} in steps {step - len(recent) + 1} to {step}, "
            f"held out {curve[measured][1]:.3f} after step {measured}",
        )

    if 0 not in curve:
        measure(model, 0, None)
    fit.fit(
        model, shards, loss, plan, machine,
        seed=settings.seed + 1,
        positions=positions,
        optimizers=optimizers,
        checkpoint=Checkpoint(folder.checkpoint, every),
        report=report,
    )  # fmt: skip


def read_curve(file: Path) -> dict[int, tuple[float | None, float]]:
    """Return the losses by step: the mean since the step before, and that of held-out texts."""
    if not file.exists():
        return {}
    with explained(damaged(file)):
        rows = json.loads(file.read_text())
        return {
            int(step): (None if learned is None else float(learned), float(held_out))
            for step, learned, held_out in rows
        }
