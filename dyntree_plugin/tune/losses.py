"""Compare a draft with what a target has taught: the losses that drafts are fitted by."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Compared(NamedTuple):
    """A draft's law beside the target's at N positions, float32 [N].

    ``divergence``: Kullback-Leibler divergence of the draft's law from the target's, in nats.
    ``overlap``: the sum of the smaller one of the two probabilities over all tokens, which is the
    chance that rejection sampling accepts the draft's token.
    """

    divergence: torch.Tensor
    overlap: torch.Tensor

    def loss(self) -> torch.Tensor:
        """Return the loss of a draft for trees, [N], half of which is the divergence.

        The other half is -log overlap (LK loss, arXiv 2602.23881), which favours the first child;
        the divergence covers what the later children need.
        """
        return (self.divergence - self.overlap.log()) / 2


def compare(
    logits: torch.Tensor, top_tokens: torch.Tensor, top_log_probs: torch.Tensor
) -> Compared:
    """Compare a draft's ``logits`` [N, V] with the target's likeliest tokens.

    ``top_tokens`` int [N, K] and ``top_log_probs`` [N, K] are those of a shard. All other tokens
    count as one, so the divergence is a lower bound, and the overlap an upper one. A token that
    the draft does not have is among the others.
    """
    p, log_p, log_q, rest_p, rest_q = _laws(logits, top_tokens, top_log_probs)
    of_top = (p * (log_p - log_q)).sum(-1)
    divergence = of_top + rest_p * (rest_p.log() - rest_q.log())
    overlap = torch.minimum(p, log_q.exp()).sum(-1) + torch.minimum(rest_p, rest_q)
    return Compared(divergence, overlap)


def within(
    logits: torch.Tensor, top_tokens: torch.Tensor, top_log_probs: torch.Tensor
) -> torch.Tensor:
    """Return the part of the divergence that is due to the top tokens of a draft, [N].

    The arguments are those of `compare`. Unlike there, p is not completed by the other tokens:
    where the target most likely writes something that a head cannot draft, there is less to gain.
    """
    p, log_p, log_q, _, _ = _laws(logits, top_tokens, top_log_probs)
    return (p * (log_p - log_q)).sum(-1)


_LEAST = 1e-6


def _laws(
    logits: torch.Tensor, top_tokens: torch.Tensor, top_log_probs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the target's probabilities of its top tokens, their logs, and those of the draft;
    then the two probabilities of all others."""
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
