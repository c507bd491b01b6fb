"""What a draft leaves unknown of the texts that its target wrote, in bits per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tune.eagle import Head
from dyntree_plugin.tune.optimize import Batch
from dyntree_plugin.tune.posterior import Posterior, likeliest_beta, surprises
from dyntree_plugin.tune.shards import WEIGHTS, Sample, Shards

Logits = Callable[[Batch], torch.Tensor]
"""Returns a draft's logits [B, L, V] of the token behind each position of a batch. Those of tokens
that it cannot draft are -inf."""


@torch.inference_mode()
def posteriors(
    logits: Logits, shards: Shards, samples: Sequence[Sample], device: torch.device
) -> Mapping[float, Posterior]:
    """Return the posterior of every temperature at which the samples were written.

    ``shards`` are those of the ``samples``, one by one. Beta, a single number, is fitted to the
    same texts. Tokens that the draft cannot draft are left out, and their share is told.
    """
    found = {}
    for temperature in sorted({sample.temperature for sample in samples}):
        numbers = [n for n, sample in enumerate(samples) if sample.temperature == temperature]
        rows = [_of_sample(logits, shards, n, samples[n], device) for n in numbers]
        scores, tokens = (torch.cat(each) for each in zip(*rows, strict=True))
        reached = scores.gather(1, tokens[:, None])[:, 0] > -torch.inf
        unreachable = 1 - float(reached.float().mean())
        scores, tokens = scores[reached], tokens[reached]
        beta = likeliest_beta(scores, tokens)
        of_reached = surprises(scores, tokens, beta)
        found[temperature] = Posterior.of(temperature, beta, of_reached, unreachable)
    return found


def of_draft(draft: PreTrainedModel) -> Logits:
    """Return the logits of a draft model."""

    def logits(batch: Batch) -> torch.Tensor:
        found: torch.Tensor = draft(input_ids=batch["tokens"], use_cache=False).logits.float()
        return found

    return logits


def of_head(head: Head, embedding: torch.Tensor) -> Logits:
    """Return the logits of a head's first step, which reads the target's hidden states.

    ``embedding`` [V, H] is the target's. The first position has no logits, and gets equal ones: a
    head reads a token with the state before it.
    """

    def logits(batch: Batch) -> torch.Tensor:
        tokens = batch["tokens"]
        states = batch["states"].to(head.fc.weight.dtype)
        own = next(head.unrolled(states, embedding[tokens], 1)).float()
        found = own.new_full((*tokens.shape, len(embedding)), -torch.inf)
        found[:, 1:, head.tokens] = own
        found[:, 0] = 0
        return found

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
    own = logits(batch)[0, first : first + count].contiguous()
    scores = perturb_on(device)(own, temperatures, seeds, positions)
    return scores, torch.tensor(sample.answer, device=device)
