"""Top-k, top-p and min-p on a draft's logits, before growth divides them by the temperature.

Growth ranks logits with noise, so it must know which tokens a distribution lacks, and nothing else
of it. All three parameters keep the most likely tokens, so each row has one threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MOST_KEPT = 128
"""Tokens of a row that are looked at. A distribution of more is left whole: what it lacks hardly
ever becomes a candidate, and looking for it would take a sort of the vocabulary."""


class Truncation(NamedTuple):
    """Parameters of M rows, [M] each, as in vLLM's sampling parameters.

    ``temperatures``, ``top_p`` and ``min_p`` float32. ``top_k`` integers: the size of the
    vocabulary or more for all tokens.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def truncate(logits: torch.Tensor, by: Truncation) -> torch.Tensor:
    """Set logits [M, V] float32 of tokens that the parameters exclude to ``-inf``, in place.

    The order is that of vLLM's sampler: temperature, min-p, top-k, top-p. Tokens that are equal to
    the last one kept are kept. Rows at temperature 0 stay as they are, and so do rows that are no
    distribution. The result is ``logits``.
    """
    warm = by.temperatures > 0
    scale = torch.where(warm, by.temperatures, 1.0)[:, None]
    best = logits.topk(min(MOST_KEPT, logits.shape[1]), dim=1).values
    scores, place = best / scale, torch.arange(best.shape[1], device=logits.device)
    kept = (scores >= scores[:, :1] + by.min_p.log()[:, None]) & (place < by.top_k[:, None])
    # What min-p or top-k excludes counts for nothing in top-p.
    of_kept = scores.masked_fill(~kept, -torch.inf).logsumexp(dim=1)
    total = torch.where(kept[:, -1], (logits / scale).logsumexp(dim=1), of_kept)
    chances = (scores - total[:, None]).exp()
    before, top_p = chances.cumsum(dim=1) - chances, by.top_p[:, None]
    kept &= (before < top_p) | (top_p >= 1)
    least = best.masked_fill(~kept, torch.inf).amin(dim=1)
    whole = kept[:, -1] | ~warm | ~least.isfinite()
    least = torch.where(whole, -torch.inf, least)
    return logits.masked_fill_(logits < least[:, None], -torch.inf)
