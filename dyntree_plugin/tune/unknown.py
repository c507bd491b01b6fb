"""Measure what a draft leaves unknown of its target's texts, in bits per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tune.eagle import Head
from dyntree_plugin.tune.posterior import Posterior, likeliest_beta, surprises
from dyntree_plugin.tune.shards import WEIGHTS, Batch, Sample, Shards

Logits = Callable[[Batch], torch.Tensor]
"""Returns a draft's logits [B, L, V] of the token after each position of a batch, -inf for tokens
that it cannot draft."""


@torch.inference_mode()
def posteriors(
    logits: Logits, shards: Shards, samples: Sequence[Sample], device: torch.device
) -> Mapping[float, Posterior]:
    """Return the posterior for each temperature of the samples.

    ``shards`` have the texts of the ``samples``, in the same order. One beta is fitted to the same
    texts. Tokens that the draft cannot draft are left out; `Posterior` has their share.
    """
    by_temperature = {}
    for temperature in sorted({sample.temperature for sample in samples}):
        numbers = [n for n, sample in enumerate(samples) if sample.temperature == temperature]

        def scored(numbers: Sequence[int] = numbers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number in numbers:
                scores, tokens = _of_sample(logits, shards, number, samples[number], device)
                reached = scores.gather(1, tokens[:, None])[:, 0] > -torch.inf
                yield scores[reached], tokens[reached]

        beta = likeliest_beta(scored)
        found = torch.cat([surprises(scores, tokens, beta) for scores, tokens in scored()])
        written = sum(len(samples[number].answer) for number in numbers)
        unreachable = 1 - len(found) / written
        by_temperature[temperature] = Posterior.of(temperature, beta, found, unreachable)
    return by_temperature


def of_draft(draft: PreTrainedModel) -> Logits:
    """Return the logits of a draft model."""

    def logits(batch: Batch) -> torch.Tensor:
        drafted: torch.Tensor = draft(input_ids=batch["tokens"], use_cache=False).logits.float()
        return drafted

    return logits


def of_head(head: Head, embedding: torch.Tensor) -> Logits:
    """Return the logits of a head's first step, which reads the target's hidden states.

    ``embedding`` [V, H] is the target's. The first position gets equal logits, since a head reads
    a token with the state before it.
    """

    def logits(batch: Batch) -> torch.Tensor:
        tokens = batch["tokens"]
        states = batch["states"].to(head.fc.weight.dtype)
        drafted = next(head.unrolled(states, embedding[tokens], 1)).float()
        every = drafted.new_full((*tokens.shape, len(embedding)), -torch.inf)
        every[:, 1:, head.tokens] = drafted
        every[:, 0] = 0
        return every

    return logits


def _of_sample(
    logits: Logits, shards: Shards, number: int, sample: Sample, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores [T, V] of an answer's tokens, and these tokens."""
    batch = {name: each.to(device) for name, each in shards.batch([number]).items()}
    if int(batch[WEIGHTS].sum()) != len(sample.tokens):
        raise ValueError("the samples must be those of the shards")
    first, count = len(sample.prompt) - 1, len(sample.answer)
    positions = torch.arange(first, first + count, device=device)
    temperatures = torch.full((count,), sample.temperature, device=device)
    seeds = torch.full((count,), sample.seed, device=device)
    of_answer = logits(batch)[0, first : first + count].contiguous()
    scores = perturb_on(device)(of_answer, temperatures, seeds, positions)
    return scores, torch.tensor(sample.answer, device=device)
