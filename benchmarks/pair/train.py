"""Training of the embedded pair: tokenizer, target, and a draft distilled from the target.

The draft learns the target's distribution, on library text and on text that the target
wrote itself, which is what a draft reads in use.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pair.corpus import is_test
from benchmarks.pair.models import DRAFT, TARGET, continue_rows, new_model
from dyntree_plugin.pair.corpus import Source
from dyntree_plugin.pair.models import Model, Shape, in_dtype
from dyntree_plugin.tune.optimize import Checkpoint, Loss, Schedule, optimize, working_copies
from dyntree_plugin.tune.shards import Batch

logger = logging.getLogger(__name__)

CHECKPOINT_STEPS = 250


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a pair, given the corpus. The defaults made the shipped one."""

    vocabulary: int = 1024
    length: int = 256  # tokens of a row
    library_share: float = 0.65  # of the rows; the rest are from the library's tests
    target: Shape = TARGET
    draft: Shape = DRAFT
    target_schedule: Schedule = field(default_factory=lambda: Schedule(steps=1560, peak=5e-3))
    draft_schedule: Schedule = field(
        default_factory=lambda: Schedule(steps=3750, peak=5e-3, decay=0.4)
    )
    written_rows: int = 256  # rows that the target writes for the draft
    written_share: float = 0.25  # of the draft's rows
    seed: int = 0


SECOND_DRAFT = Recipe(
    library_share=0.0,
    draft_schedule=Schedule(steps=3000, peak=5e-3, decay=0.4),
    seed=10,
)
"""Recipe of the second draft: it reads tests alone, so that it errs elsewhere than the first."""


@dataclass(frozen=True)
class Tokens:
    """The corpus as two streams of token ids, documents joined by the end-of-text token."""

    library: torch.Tensor
    tests: torch.Tensor


def tokenize(sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast) -> Tokens:
    library = [source.text for source in sources if not is_test(source)]
    tests = [source.text for source in sources if is_test(source)]
    return Tokens(token_stream(library, tokenizer), token_stream(tests, tokenizer))


def token_stream(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
    end = np.array([tokenizer.eos_token_id])
    parts = [part for text in encoded for part in (end, np.asarray(text.ids))]
    return torch.from_numpy(np.concatenate(parts or [end]))


def train_target(
    tokens: Tokens, recipe: Recipe, checkpoint: Path | None = None
) -> LlamaForCausalLM:
    """The target, in fp32. Resumes from `checkpoint` if the file exists, and keeps it current."""
    model = new_model(recipe.target, recipe.vocabulary, recipe.seed)

    def loss(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
        rows = batch["rows"]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        wanted = rows[:, 1:].flatten()
        total = cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="sum")
        return total, wanted.numel()

    rows = _corpus_rows(tokens, recipe, recipe.seed + 1)
    return train(model, rows, loss, recipe.target_schedule, "target", checkpoint)


def distil_draft(
    target: LlamaForCausalLM,
    tokens: Tokens,
    written: torch.Tensor,
    recipe: Recipe,
    checkpoint: Path | None = None,
) -> LlamaForCausalLM:
    """The draft, in fp32, trained to the target's distribution by Kullback-Leibler divergence.

    `written` are rows (count, length + 1) of the target's own text, from `write_rows`.
    """
    teacher = in_dtype(target, torch.bfloat16)
    model = new_model(recipe.draft, recipe.vocabulary, recipe.seed + 2)

    def loss(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
        read = batch["rows"][:, :-1]
        with torch.no_grad():
            wanted = log_softmax(teacher(input_ids=read, use_cache=False).logits.float(), -1)
        given = log_softmax(model(input_ids=read, use_cache=False).logits.float(), -1)
        return kl_div(given, wanted, log_target=True, reduction="sum"), read.numel()

    rows = read_rows(tokens, written, recipe)
    return train(model, rows, loss, recipe.draft_schedule, "draft", checkpoint)


def read_rows(tokens: Tokens, written: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Endless rows of length + 1 tokens, of the corpus and `written_share` of them `written`."""
    generator = torch.Generator().manual_seed(recipe.seed + 3)
    own = _shuffled(list(written.unbind()), generator)
    corpus = _corpus_rows(tokens, recipe, recipe.seed + 4)
    return _mixed(own, corpus, recipe.written_share, generator)


@torch.no_grad()
def write_rows(
    target: LlamaForCausalLM, tokens: Tokens, recipe: Recipe, *, batch: int = 128
) -> torch.Tensor:
    """Rows (written_rows, length + 1) that the target continued from the corpus.

    Each starts with a sixteenth to a half row of the corpus. A third are greedy, the others
    sampled at temperatures 0.8 and 1.
    """
    model = in_dtype(target, torch.bfloat16)
    corpus = _corpus_rows(tokens, recipe, recipe.seed + 5)
    generator = torch.Generator().manual_seed(recipe.seed + 6)
    starts = [max(1, recipe.length // part) for part in (16, 8, 4, 2)]
    batches: list[torch.Tensor] = []
    with _progress() as progress:
        bar = progress.add_task("written by the target", total=recipe.written_rows, note="")
        while (count := recipe.written_rows - sum(map(len, batches))) > 0:
            start = starts[len(batches) % len(starts)]
            prompts = torch.stack([next(corpus)[:start] for _ in range(min(batch, count))])
            temperature = torch.tensor([0.0, 0.8, 1.0]).repeat(batch)[: len(prompts), None]
            batches.append(continue_rows(model, prompts, recipe.length + 1, temperature, generator))
            progress.update(bar, advance=len(prompts))
    return torch.cat(batches)


def _corpus_rows(tokens: Tokens, recipe: Recipe, seed: int) -> Iterator[torch.Tensor]:
    """Endless rows of length + 1 tokens; each stream is shuffled and exhausted in turn."""
    generator = torch.Generator().manual_seed(seed)
    library = _cut(tokens.library, recipe.length, generator)
    if len(tokens.tests) <= 2 * recipe.length:  # an installation without tests
        return library
    tests = _cut(tokens.tests, recipe.length, generator)
    return _mixed(library, tests, recipe.library_share, generator)


def _cut(stream: torch.Tensor, length: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    if len(stream) <= 2 * length:
        raise ValueError(f"a corpus of {len(stream)} tokens is too short for rows of {length}")
    while True:
        start = int(torch.randint(length, (1,), generator=generator))
        rows = stream[start:].unfold(0, length + 1, length)
        yield from rows[torch.randperm(len(rows), generator=generator)].unbind()


def _shuffled(rows: list[torch.Tensor], generator: torch.Generator) -> Iterator[torch.Tensor]:
    while True:
        for index in torch.randperm(len(rows), generator=generator).tolist():
            yield rows[index]


def _mixed(
    first: Iterator[torch.Tensor],
    second: Iterator[torch.Tensor],
    share: float,
    generator: torch.Generator,
) -> Iterator[torch.Tensor]:
    while True:
        yield next(first if float(torch.rand(1, generator=generator)) < share else second)


def train(
    model: Model,
    rows: Iterator[torch.Tensor],
    loss: Loss[Model],
    schedule: Schedule,
    name: str,
    checkpoint: Path | None,
) -> Model:
    """Train the fp32 `model` on `rows` of tokens through bfloat16 copies, and show the progress.

    It is a sixth faster than autocast on a Zen 4.
    """

    def batches() -> Iterator[Batch]:
        while True:
            yield {"rows": torch.stack([next(rows) for _ in range(schedule.rows)])}

    with _progress() as progress:
        bar = progress.add_task(name, total=schedule.steps, note="")

        recent: deque[float] = deque(maxlen=100)

        def report(_: torch.nn.Module, step: int, loss: float) -> None:
            recent.append(loss)
            progress.update(bar, completed=step, note=f"{fmean(recent):.3f} nats")
            if step % 100 == 0:
                logger.info("%s: step %d, %.4f nats per token", name, step, fmean(recent))

        return optimize(
            model,
            batches(),
            loss,
            schedule,
            copies=working_copies(model, torch.bfloat16),
            checkpoint=None if checkpoint is None else Checkpoint(checkpoint, CHECKPOINT_STEPS),
            report=report,
        )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
