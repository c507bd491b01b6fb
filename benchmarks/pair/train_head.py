"""An EAGLE-3 head for a stored target, trained to draft from its own drafts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import LlamaForCausalLM

from benchmarks.pair import train
from benchmarks.pair.build import add_draft, of_text
from benchmarks.pair.models import rounded
from dyntree_plugin.pair.models import Shape, in_dtype
from dyntree_plugin.tune import head as tune
from dyntree_plugin.tune.eagle import (
    Head,
    OfTarget,
    head_config,
    load_head,
    new_head,
    read_target,
    save_head,
)
from dyntree_plugin.tune.optimize import Schedule
from dyntree_plugin.tune.shards import Batch

NAME = "eagle3"

HEAD = Shape(hidden=256, intermediate=704, layers=1, heads=8, kv_heads=4)


@dataclass(frozen=True)
class HeadRecipe:
    """Everything that determines a head, given the target and the corpus.

    Of `text`, the row length, the shares, the written rows and the seed count. `steps` are those
    of the training-time test, each of which weighs `step_weight` times the one before.
    """

    text: train.Recipe = field(
        default_factory=lambda: train.Recipe(written_rows=1024, written_share=0.5, seed=20)
    )
    head: Shape = HEAD
    layers: tuple[int, ...] = (1, 3, 5)
    vocabulary: int = 512
    steps: int = 5
    step_weight: float = 0.9
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=3000, peak=5e-3, decay=0.4))


def add_head(pair: Path, recipe: HeadRecipe, **where: Any) -> dict[str, Any]:
    """Train `pair`/eagle3 for `pair`/target, and add it as `add_draft` does, with `where`."""

    def make(target: Any, tokens: Any, written: Any, checkpoint: Any) -> Head:
        trained = rounded(train_head(target, tokens, written, recipe, checkpoint))
        save_head(trained, pair / NAME)
        return load_head(pair / NAME)

    said = asdict(recipe) | {"text": of_text(recipe.text)}
    return add_draft(pair, NAME, recipe.text, make, said, **where)


def train_head(
    target: LlamaForCausalLM,
    tokens: train.Tokens,
    written: torch.Tensor,
    recipe: HeadRecipe,
    checkpoint: Path | None = None,
) -> Head:
    """The head, in fp32. `written` and `checkpoint` are those of `train.distil_draft`."""
    teacher = in_dtype(target, torch.bfloat16)
    config = head_config(target.config, recipe.head, recipe.layers, recipe.vocabulary)
    kept = frequent_tokens(tokens, written, recipe, target.config.vocab_size)
    head = new_head(config, kept, OfTarget.of(target), recipe.text.seed + 2)

    def loss(head: Head, batch: Batch) -> tuple[torch.Tensor, float]:
        text = batch["rows"][:, :-1]
        weight = text.numel()
        return weight * unrolled_loss(head, teacher, text, recipe.steps, recipe.step_weight), weight

    rows = train.read_rows(tokens, written, recipe.text)
    return train.train(head, rows, loss, recipe.schedule, "head", checkpoint)


def unrolled_loss(
    head: Head, teacher: LlamaForCausalLM, text: torch.Tensor, steps: int, step_weight: float
) -> torch.Tensor:
    """Mean divergence, in nats, of the head from the target over the unrolled steps.

    The sum of p log(p / q) is over the tokens that the head can draft. p is not scaled to a sum of
    one there: where the target most likely writes something else, there is less to gain.
    """
    states, embedded, logits = read_target(teacher, text, head.layers)
    log_probs = log_softmax(logits.float(), -1)[..., head.tokens]
    tokens = torch.arange(len(head.tokens)).expand_as(log_probs)
    return tune.unrolled_loss(
        head, states, embedded, (tokens, log_probs), torch.ones(text.shape), steps, step_weight
    )


def frequent_tokens(
    tokens: train.Tokens, written: torch.Tensor, recipe: HeadRecipe, vocabulary: int
) -> torch.Tensor:
    """The most frequent of a `vocabulary` in what the head is trained on, ascending."""
    library, tests, own = (
        torch.bincount(text.flatten(), minlength=vocabulary) / max(1, text.numel())
        for text in (tokens.library, tokens.tests, written)
    )
    read = torch.lerp(tests, library, recipe.text.library_share)
    frequency = torch.lerp(read, own, recipe.text.written_share)
    return frequency.topk(recipe.vocabulary).indices.sort().values
