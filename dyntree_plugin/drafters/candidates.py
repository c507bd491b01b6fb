"""Turn draft logits into candidate children with an estimate of their acceptance."""

from __future__ import annotations

import torch


def temperature_scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Draft logits [M, V] over the target's temperature [M]; greedy rows (0) stay as they are."""
    scale = torch.where(temperature > 0, temperature, 1.0)
    return logits.float() / scale[:, None]


def top_children(
    scores: torch.Tensor, count: int, chain: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best children per row and the log of their estimated acceptance.

    ``scores`` float32 [M, V] are scaled draft logits, with the target sampler's own Gumbel noise
    added where drafting is coupled. Without noise the estimate is the draft probability (DySpec,
    arXiv 2410.11744). With noise the token of the largest score is the draft's draw, and if the
    target's logits differ from the draft's by noise of the same kind, softmax of the noised
    scores is the chance that a child is the target's draw.

    ``chain`` bool [M]: rows that keep their best child only. Returns tokens int64 and log
    probabilities float32, both [M, count].
    """
    best = scores.topk(count, dim=1)
    log_probs = best.values - scores.logsumexp(dim=1, keepdim=True)
    if chain is not None:
        log_probs[:, 1:].masked_fill_(chain[:, None], float("-inf"))
    return best.indices, log_probs
