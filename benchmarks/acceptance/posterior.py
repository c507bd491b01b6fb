"""What a draft leaves unknown of the texts in a trial."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.texts import Prompts, logits_along
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tune.posterior import Posterior, likeliest_beta, surprises

_PROMPTS_AT_ONCE = 32


@torch.inference_mode()
def fitted_beta(
    draft: PreTrainedModel, prompts: Prompts, text: torch.Tensor, temperature: float
) -> float:
    """Return the beta that makes the target's ``text`` [R, T] behind the prompts likeliest."""
    scored = _scores(draft, prompts, text, temperature), text.flatten()
    return likeliest_beta(lambda: [scored])


@torch.inference_mode()
def measure(
    draft: PreTrainedModel, prompts: Prompts, text: torch.Tensor, temperature: float, beta: float
) -> Posterior:
    """Return the posterior along the target's ``text`` [R, T] behind the prompts."""
    found = []
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        rows = slice(start, start + _PROMPTS_AT_ONCE)
        scores = _scores(draft, prompts.part(rows), text[rows], temperature)
        found.append(surprises(scores, text[rows].flatten(), beta))
    return Posterior.of(temperature, beta, torch.cat(found))


def _scores(
    draft: PreTrainedModel, prompts: Prompts, text: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the draft's logits / temperature + the noise that the target's tokens were drawn
    with, float32 [R x T, V]."""
    logits = logits_along(draft, prompts, text)
    ahead = torch.arange(text.shape[1], device=text.device)
    positions = (prompts.lengths[:, None] - 1 + ahead).flatten()
    seeds = prompts.seeds.repeat_interleave(text.shape[1])
    temperatures = torch.full(seeds.shape, temperature, device=text.device)
    return perturb_on(draft.device)(logits, temperatures, seeds, positions)
