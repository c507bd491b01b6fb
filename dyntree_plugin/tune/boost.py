"""Weigh positions for the next member of a pool by what the earlier members do not predict.

SpecInfer calls this collective boost-tuning (arXiv 2305.09781, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from dyntree_plugin.tune.optimize import Batch
from dyntree_plugin.tune.shards import WEIGHTS, Shards

Cover = Callable[[Sequence[PreTrainedModel], Batch], torch.Tensor]
"""Takes earlier members of a pool and a batch. Returns weights float32 [B, L] for the next one."""


def weights_by_position(members: Sequence[PreTrainedModel], batch: Batch) -> torch.Tensor:
    """Weigh each position by the share of the target's distribution that no member covers.

    A member covers min(p, q) of a token's probability p; several cover the largest of these.
    """
    logits = torch.stack(
        [model(input_ids=batch["tokens"], use_cache=False).logits.float() for model in members]
    )
    best = logits.log_softmax(-1).amax(0).flatten(0, 1)
    at = batch["top_tokens"].flatten(0, 1).long().clamp(max=best.shape[-1] - 1)
    p = batch["top_log_probs"].flatten(0, 1).float().exp()
    covered = torch.minimum(p, best.gather(-1, at).exp()).sum(-1)
    # Of the other tokens, only the sum is known.
    return (p.sum(-1) - covered).clamp(min=0).view_as(batch["tokens"]) * (batch[WEIGHTS] > 0)


def weights_by_sample(
    members: Sequence[PreTrainedModel], batch: Batch, tokens: int
) -> torch.Tensor:
    """Drop the pieces of ``tokens`` tokens that some member predicts in full.

    This is SpecInfer's scheme. A member predicts a piece if at each of its positions the member's
    best token is the target's.
    """
    wanted = batch["top_tokens"][..., 0]
    real = batch[WEIGHTS] > 0
    short = -wanted.shape[1] % tokens
    predicted = torch.zeros(len(wanted), (wanted.shape[1] + short) // tokens, dtype=torch.bool)
    for model in members:
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
        agree = (logits.argmax(-1) == wanted) | ~real
        pieces = torch.nn.functional.pad(agree, (0, short), value=True)
        predicted |= pieces.view(*predicted.shape, tokens).all(-1).to(predicted.device)
    kept = ~predicted.repeat_interleave(tokens, 1)[:, : wanted.shape[1]]
    return (kept.to(real.device) & real).float()


BOOSTS: dict[str, Cover] = {
    "positions": weights_by_position,
    "samples": partial(weights_by_sample, tokens=8),
}
"""The schemes by name. A piece is as long as a tree is deep."""


@torch.inference_mode()
def weights(
    members: Sequence[PreTrainedModel], shards: Shards, boost: str, rows: int
) -> Iterator[torch.Tensor]:
    """Yield the weights of the positions of each file of ``shards``, float32 [P]."""
    device = members[0].device
    lengths = shards.lengths
    for numbers in shards.by_file():
        by_text: dict[int, torch.Tensor] = {}
        for start in range(0, len(numbers), rows):
            some = numbers[start : start + rows]
            batch = {name: each.to(device) for name, each in shards.batch(some).items()}
            of_texts = BOOSTS[boost](members, batch).cpu()
            by_text |= {n: row[: lengths[n]] for n, row in zip(some, of_texts, strict=True)}
        yield torch.cat([by_text[number] for number in numbers])
