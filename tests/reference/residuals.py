"""The table of `tree.residuals` in plain torch, a token at a time."""

from __future__ import annotations

import math

import torch

from dyntree_kernels.residuals import FIRST_SUM, KEPT, MOST_BIAS, RATE, Fading, ResidualTable
from dyntree_plugin.tree.residuals import FADING


def corrected(table: ResidualTable, logits: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """Return ``logits`` [M, V] of rows that run on the tokens ``reads`` int64 [M], corrected."""
    found = logits.clone()
    for row, bucket in zip(found, (reads % len(table.tokens)).tolist(), strict=True):
        tokens, biases = table.tokens[bucket].long(), table.biases[bucket]
        sound = (tokens >= 0) & (tokens < len(row)) & (biases.abs() <= MOST_BIAS)
        at = tokens[sound]
        row[at] = (row[at].float() + biases[sound]).to(row.dtype)
    return found


def best_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best tokens of ``logits`` [V], [KEPT], and their log softmax, -inf for none."""
    log_probs = torch.nn.functional.pad(logits.float().log_softmax(0), (0, KEPT), value=-torch.inf)
    best = log_probs.sort(descending=True, stable=True)
    return best.indices[:KEPT], best.values[:KEPT]


def teach(
    table: ResidualTable,
    read: int,
    target: torch.Tensor,
    drafted: tuple[torch.Tensor, torch.Tensor],
    fading: Fading = FADING,
) -> None:
    """Update the bucket of the token ``read`` from what the target and the draft said after it.

    ``target``: the target's logits [V]. ``drafted``: the draft's best tokens, as of `best_of`.
    """
    if not target.float().isfinite().all():
        return
    bucket = read % len(table.tokens)
    if not _is_sound(table, bucket):
        _begin_anew(table, bucket)
        return
    table.biases[bucket] *= fading.biases
    table.sums[bucket] *= fading.sums
    chances = target.float().softmax(0)
    likely, _ = best_of(target)
    tokens, log_draft = drafted
    known = {int(t): float(q) for t, q in zip(tokens, log_draft, strict=True) if q > -torch.inf}
    for token, log_chance in known.items():
        _step(table, bucket, token, math.exp(log_chance) - float(chances[token]))
    bound = math.exp(float(log_draft[-1]))
    for token in likely.tolist():
        if token >= len(target) or token in known or not table.proposed[token]:
            continue
        if chances[token] > bound:
            _step(table, bucket, token, bound - float(chances[token]))
    if not _is_sound(table, bucket):
        _begin_anew(table, bucket)


def _is_sound(table: ResidualTable, bucket: int) -> bool:
    biases, sums = table.biases[bucket], table.sums[bucket]
    bounded = (biases.abs() <= MOST_BIAS) & (sums >= 0) & (sums < torch.inf)
    return bool(bounded.all())


def _begin_anew(table: ResidualTable, bucket: int) -> None:
    table.tokens[bucket], table.biases[bucket], table.sums[bucket] = -1, 0.0, 0.0


def _step(table: ResidualTable, bucket: int, token: int, gradient: float) -> None:
    """Take a step of Adagrad for one ``token`` of a bucket."""
    tokens, biases, sums = (each[bucket] for each in table[:3])
    at = (tokens == token).nonzero()[:, 0]
    known = len(at) > 0
    worth = torch.where(tokens < 0, -1.0, biases.abs())
    place = int(at[-1]) if known else int(worth.argmin())
    total = (float(sums[place]) if known else FIRST_SUM) + gradient**2
    bias = (float(biases[place]) if known else 0.0) - RATE * gradient / math.sqrt(total)
    if known or abs(bias) > worth[place]:
        tokens[place], sums[place] = token, total
        biases[place] = max(-MOST_BIAS, min(MOST_BIAS, bias))
