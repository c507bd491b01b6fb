"""A DFlash draft for a stored target, trained on blocks at random places of texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaForCausalLM

from benchmarks.pair import train
from benchmarks.pair.block import Block, block_config, load_block, new_block, save_block
from benchmarks.pair.build import add_draft, of_text
from benchmarks.pair.models import rounded
from dyntree_plugin.pair.models import Shape, in_dtype
from dyntree_plugin.tune.eagle import OfTarget, read_target
from dyntree_plugin.tune.optimize import Schedule
from dyntree_plugin.tune.shards import Batch

NAME = "dflash"

BLOCK = Shape(hidden=256, intermediate=416, layers=2, heads=8, kv_heads=4)


@dataclass(frozen=True)
class BlockRecipe:
    """Everything that determines a block draft, given the target and the corpus.

    Of `text`, the row length, the shares, the written rows and the seed count. `roots`: blocks of
    a row. A position weighs `decay` times the one before.
    """

    text: train.Recipe = field(
        default_factory=lambda: train.Recipe(written_rows=1024, written_share=0.5, seed=30)
    )
    block: Shape = BLOCK
    layers: tuple[int, ...] = (1, 3, 5)
    block_size: int = 8
    roots: int = 20
    decay: float = 0.8
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=850, peak=5e-3, decay=0.4))


def add_block(pair: Path, recipe: BlockRecipe, **where: Any) -> dict[str, Any]:
    """Train `pair`/dflash for `pair`/target, and add it as `add_draft` does, with `where`."""

    def make(target: Any, tokens: Any, written: Any, checkpoint: Any) -> Block:
        trained = rounded(train_block(target, tokens, written, recipe, checkpoint))
        save_block(trained, pair / NAME)
        return load_block(pair / NAME, target.get_input_embeddings().weight)

    said = asdict(recipe) | {"text": of_text(recipe.text)}
    return add_draft(pair, NAME, recipe.text, make, said, **where)


def train_block(
    target: LlamaForCausalLM,
    tokens: train.Tokens,
    written: torch.Tensor,
    recipe: BlockRecipe,
    checkpoint: Path | None = None,
) -> Block:
    """The draft, in fp32. `written` and `checkpoint` are those of `train.distil_draft`."""
    teacher, of_target = in_dtype(target, torch.bfloat16), OfTarget.of(target)
    config = block_config(target.config, recipe.block, recipe.layers, recipe.block_size)
    block = new_block(config, of_target.embedding, of_target.norm, recipe.text.seed + 2)

    def loss(block: Block, batch: Batch) -> tuple[torch.Tensor, float]:
        text = batch["rows"][:, :-1]
        # The places depend on the text alone, so that a run that is resumed has the same.
        generator = torch.Generator().manual_seed(int(text.sum()))
        places = 1 + torch.randperm(text.shape[1] - recipe.block_size, generator=generator)
        weight = text.numel()
        mean = block_loss(block, teacher, text, places[: recipe.roots], recipe.decay)
        return weight * mean, weight

    rows = train.read_rows(tokens, written, recipe.text)
    return train.train(block, rows, loss, recipe.schedule, NAME, checkpoint)


def block_loss(
    block: Block, teacher: LlamaForCausalLM, text: torch.Tensor, roots: torch.Tensor, decay: float
) -> torch.Tensor:
    """Mean divergence, in nats, of the draft from the target over the positions of the blocks.

    The target reads the text between the root and a position, which the draft does not know: it
    learns the mean of what the target says over such texts.
    """
    states, _, logits = read_target(teacher, text, block.streams)
    found = log_softmax(block(states, text, roots).float(), -1)
    ahead = torch.arange(found.shape[2])
    wanted = log_softmax(logits.float(), -1)[:, roots[:, None] + ahead]
    loss = kl_div(found, wanted, log_target=True, reduction="none").sum(-1).mean((0, 1))
    weights = decay**ahead
    return (loss * weights).sum() / weights.sum()
