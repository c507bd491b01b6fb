"""Fit an EAGLE-3 head to its target (arXiv 2503.01840), by the rows that it has when it drafts."""

from __future__ import annotations

from functools import cache
from itertools import count

import torch

from dyntree_plugin.tune.eagle import Head
from dyntree_plugin.tune.losses import within
from dyntree_plugin.tune.optimize import Batch, Loss
from dyntree_plugin.tune.shards import WEIGHTS, Shards

STEPS = 5
"""Steps of the training-time test: tokens that a head drafts from its own drafts."""

STEP_WEIGHT = 0.9
"""How much a step weighs, beside the one before."""


def unrolled_loss(
    head: Head,
    states: torch.Tensor,
    embedded: torch.Tensor,
    laws: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    steps: int = STEPS,
    step_weight: float = STEP_WEIGHT,
) -> torch.Tensor:
    """Return the mean divergence of the head from the target, in nats, over the unrolled steps.

    ``states`` and ``embedded`` are those of `Head.unrolled`. ``laws``: tokens by the head's own
    numbers, int64 [B, L, K], -1 for those that it cannot draft, and their log probabilities for the
    target behind each position. ``weights`` [B, L]: of the positions.
    """
    tokens, log_probs = laws
    total = states.new_zeros((), dtype=torch.float32)
    sum_of_weights = 0.0
    for step, given in zip(count(1), head.unrolled(states, embedded, steps), strict=False):
        own, share = weights[:, step:], step_weight ** (step - 1)
        found = (own * within(given, tokens[:, step:], log_probs[:, step:])).sum()
        total = total + share * found / own.sum().clamp(min=1)
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
        embedded, own = of_target(weight.device, weight.dtype)
        laws = own[batch["top_tokens"].long()], batch["top_log_probs"]
        states = batch["states"].to(weight.dtype)
        weights = batch[WEIGHTS]
        mean = unrolled_loss(head, states, embedded[batch["tokens"]], laws, weights)
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
    """Return the layers of a target of so many whose input streams a head reads: a low one, a
    middle one and a high one."""
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, layers - 1)
