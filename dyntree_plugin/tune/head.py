"""Fit an EAGLE-3 head to its target by the training-time test (arXiv 2503.01840)."""

from __future__ import annotations

from functools import cache
from itertools import count

import torch

from dyntree_plugin.tune.eagle import Head
from dyntree_plugin.tune.losses import within
from dyntree_plugin.tune.optimize import Loss
from dyntree_plugin.tune.shards import WEIGHTS, Batch, Shards

STEPS = 5
"""Steps of the training-time test: tokens that a head drafts one after another."""

STEP_WEIGHT = 0.9
"""Weight of a step over that of the step before."""


def unrolled_loss(
    head: Head,
    states: torch.Tensor,
    embedded: torch.Tensor,
    top: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    steps: int = STEPS,
    step_weight: float = STEP_WEIGHT,
) -> torch.Tensor:
    """Return the mean divergence of the head from the target, in nats, over the unrolled steps.

    ``states`` and ``embedded`` are those of `Head.unrolled`. ``top``: the target's likeliest tokens
    after each position as ids of the head, int64 [B, L, K], -1 for those that it cannot draft, and
    their log probabilities. ``weights`` [B, L]: of the positions.
    """
    tokens, log_probs = top
    total = states.new_zeros((), dtype=torch.float32)
    sum_of_weights = 0.0
    for step, logits in zip(count(1), head.unrolled(states, embedded, steps), strict=False):
        here, share = weights[:, step:], step_weight ** (step - 1)
        loss = (here * within(logits, tokens[:, step:], log_probs[:, step:])).sum()
        total = total + share * loss / here.sum().clamp(min=1)
        sum_of_weights += share
    return total / sum_of_weights


def head_loss(embedding: torch.Tensor, tokens: torch.Tensor) -> Loss[Head]:
    """Return the `Loss` of a head that drafts the target's ``tokens``, int64 [Vd], ascending.

    ``embedding`` [V, H] is the target's.
    """
    numbers = torch.full((len(embedding),), -1)
    numbers[tokens] = torch.arange(len(tokens))

    @cache
    def of_target(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return embedding.to(device, dtype), numbers.to(device)

    def loss(head: Head, batch: Batch) -> tuple[torch.Tensor, float]:
        weight = head.fc.weight
        embedded, ids = of_target(weight.device, weight.dtype)
        top = ids[batch["top_tokens"].long()], batch["top_log_probs"]
        states = batch["states"].to(weight.dtype)
        weights = batch[WEIGHTS]
        mean = unrolled_loss(head, states, embedded[batch["tokens"]], top, weights)
        return weights.sum() * mean, float(weights.sum())

    return loss


def frequent_tokens(shards: Shards, count: int, vocabulary: int) -> torch.Tensor:
    """Return the ``count`` most frequent tokens of some texts, int64, ascending."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for numbers in shards.by_file():
        batch = shards.batch(numbers)
        counts += torch.bincount(batch["tokens"][batch[WEIGHTS] > 0], minlength=vocabulary)
    return counts.topk(min(count, vocabulary)).indices.sort().values


def default_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose input streams a head reads: a low, a middle and a high one.

    ``layers``: the number of the target's layers.
    """
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, layers - 1)
