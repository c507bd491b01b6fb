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

    ``chain`` bool [M]: rows that keep their best child only. Rows without a distribution, which
    hold NaN, +inf or nothing but -inf, have no children. Returns tokens int64 and log
    probabilities float32, both [M, count].
    """
    best = scores.topk(count, dim=1)
    total = scores.logsumexp(dim=1, keepdim=True)
    log_probs = torch.where(total.isfinite(), best.values - total, float("-inf"))
    return best.indices, only_first(log_probs, chain)


def sampled_children(
    log_probs: torch.Tensor, count: int, noise: torch.Tensor, chain: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` draws per row without replacement, in draw order, and log D of each.

    ``log_probs`` float32 [M, V] is log D; ``noise`` [M, V] independent Gumbel noise: the largest
    sums are draws one after another, each from what the earlier left (arXiv 1903.06059). Where
    nothing is left to draw the log probability is ``-inf``. ``chain`` as in `top_children`.
    Returns tokens int64 and log probabilities float32, both [M, count].
    """
    drawn = (log_probs + noise).topk(min(count, log_probs.shape[1]), dim=1).indices
    found = log_probs.gather(1, drawn)
    short = count - drawn.shape[1]
    if short > 0:
        drawn = torch.nn.functional.pad(drawn, (0, short))
        found = torch.nn.functional.pad(found, (0, short), value=float("-inf"))
    return drawn, only_first(found, chain)


def drawn_children(
    log_probs: torch.Tensor, count: int, noise: torch.Tensor, chain: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` independent draws per row, and log D of each; a token may come several times.

    ``log_probs`` float32 [M, V] is log D; ``noise`` [M, count, V] independent Gumbel noise.
    ``chain`` as in `top_children`. Returns as `sampled_children`.
    """
    if noise.shape[1] != count:
        raise ValueError(f"noise {tuple(noise.shape)} must be [rows, {count}, vocabulary]")
    drawn = (log_probs[:, None] + noise).argmax(dim=2)
    return drawn, only_first(log_probs.gather(1, drawn), chain)


def only_first(log_probs: torch.Tensor, chain: torch.Tensor | None) -> torch.Tensor:
    """Leave rows of ``chain`` their first child only."""
    if chain is not None:
        log_probs[:, 1:].masked_fill_(chain[:, None], float("-inf"))
    return log_probs
