"""Compare a draft's distributions with its target's: the losses of fitting."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Compared(NamedTuple):
    """A draft's distributions compared with the target's at N positions, float32 [N].

    ``divergence``: Kullback-Leibler divergence of the draft from the target, in nats. ``overlap``:
    the sum over all tokens of the smaller probability, which is the chance that rejection sampling
    accepts the draft's token.
    """

    divergence: torch.Tensor
    overlap: torch.Tensor

    def loss(self) -> torch.Tensor:
        """Return the loss of a draft for trees, [N]: half divergence, half -log overlap.

        The overlap (LK loss, arXiv 2602.23881) favours a node's first child, and the divergence
        counts for all children.
        """
        return (self.divergence - self.overlap.log()) / 2


def compare(
    logits: torch.Tensor, top_tokens: torch.Tensor, top_log_probs: torch.Tensor
) -> Compared:
    """Compare a draft's ``logits`` [N, V] with the target's likeliest tokens.

    ``top_tokens`` int [N, K] and ``top_log_probs`` [N, K] are those of a shard. All other tokens,
    and those that the draft does not have, count as one. So the divergence is a lower bound, and
    the overlap an upper one.
    """
    p, log_p, log_q, rest_p, rest_q = _probabilities(logits, top_tokens, top_log_probs)
    of_top = (p * (log_p - log_q)).sum(-1)
    divergence = of_top + rest_p * (rest_p.log() - rest_q.log())
    overlap = torch.minimum(p, log_q.exp()).sum(-1) + torch.minimum(rest_p, rest_q)
    return Compared(divergence, overlap)


def within(
    logits: torch.Tensor, top_tokens: torch.Tensor, top_log_probs: torch.Tensor
) -> torch.Tensor:
    """Return the part of the divergence that comes from the top tokens, [N].

    The arguments are those of `compare`. Here p is not completed by the other tokens: if the target
    likely writes something that a head cannot draft, there is less to gain.
    """
    p, log_p, log_q, _, _ = _probabilities(logits, top_tokens, top_log_probs)
    return (p * (log_p - log_q)).sum(-1)


_LEAST = 1e-6


def _probabilities(
    logits: torch.Tensor, top_tokens: torch.Tensor, top_log_probs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the target's probabilities of its top tokens, their logarithms, the draft's, and then
    the two probabilities of all others."""
    known = (top_tokens >= 0) & (top_tokens < logits.shape[-1])
    at = torch.where(known, top_tokens, 0).long()
    log_q = logits.float().log_softmax(-1).gather(-1, at)
    log_p = top_log_probs.float()
    p = torch.where(known, log_p.exp(), 0.0)
    log_q = torch.where(known, log_q, log_p)
    q = torch.where(known, log_q.exp(), 0.0)
    rest_p = (1 - p.sum(-1)).clamp(min=_LEAST)
    rest_q = (1 - q.sum(-1)).clamp(min=_LEAST)
    return p, log_p, log_q, rest_p, rest_q
