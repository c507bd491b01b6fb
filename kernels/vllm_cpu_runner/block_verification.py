"""Kernels for block verification (Sun et al., arXiv 2403.10444) of vLLM's own draft chains.

The ratio of a draft is that of the probabilities which target and draft give the chain up to it,
cut at 1 after every draft. With a ratio r before a row, the row's residual is
max(r * target - draft, 0).
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys
from vllm_cpu_runner.registry import implements
from vllm_cpu_runner.rejection_stats import Sums, blocks, drafted_log_probs, log_sums, scaled_draft

_F0, _F1 = np.float32(0), np.float32(1)


@compiled
def _accumulate(
    log_ratios, target_log_probs, draft_log_probs, drafts, cu_num_logits, requests, temperatures
):
    for i in range(requests.shape[0]):
        if temperatures[requests[i]] == 0:
            continue
        log_ratio = _F0
        for row in range(cu_num_logits[i], cu_num_logits[i + 1] - 1):
            if drafts[row + 1] >= 0:
                found = log_ratio + (target_log_probs[row] - draft_log_probs[row])
                log_ratio = found if found < _F0 else _F0
            log_ratios[row] = log_ratio


@implements(
    "spec_decode.rejection_sampler_utils._compute_cumulative_log_p_kernel",
    "vocab_num_blocks HAS_DRAFT_LOGITS",
)
def cumulative_log_ratios(
    cumulative_log_p: torch.Tensor, target_logits: torch.Tensor, target_local_max: torch.Tensor,
    target_local_sumexp: torch.Tensor, draft_sampled: torch.Tensor,
    draft_logits: torch.Tensor | None, draft_local_max: torch.Tensor,
    draft_local_sumexp: torch.Tensor, cu_num_logits: torch.Tensor, idx_mapping: torch.Tensor,
    temp: torch.Tensor,
) -> None:  # fmt: skip
    sums = Sums(target_local_max, target_local_sumexp, draft_local_max, draft_local_sumexp)
    of_target, of_draft = drafted_log_probs(
        target_logits, draft_logits, sums, draft_sampled, cu_num_logits, idx_mapping, temp
    )
    _accumulate(
        *numpys(
            cumulative_log_p, of_target, of_draft, draft_sampled, cu_num_logits, idx_mapping, temp
        )
    )


@implements(
    "spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel",
    "vocab_num_blocks",
)
def local_residual_mass(
    local_residual_mass: torch.Tensor, cumulative_log_p: torch.Tensor, target_logits: torch.Tensor,
    target_local_max: torch.Tensor, target_local_sumexp: torch.Tensor, draft_logits: torch.Tensor,
    draft_local_max: torch.Tensor, draft_local_sumexp: torch.Tensor, draft_sampled: torch.Tensor,
    expanded_idx_mapping: torch.Tensor, expanded_local_pos: torch.Tensor, temp: torch.Tensor,
    vocab_size: int, num_speculative_steps: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    """Sum the residual of each row that verifies a draft after the first, per block."""
    verifies = (expanded_local_pos > 0) & (expanded_local_pos < num_speculative_steps)
    verifies &= (draft_sampled.roll(-1) >= 0) & (temp[expanded_idx_mapping] != 0)
    verifies[-1] = False
    rows = verifies.nonzero().view(-1)
    if not rows.numel():
        return
    requests, steps = expanded_idx_mapping[rows], expanded_local_pos[rows].long()
    target = target_logits[rows, :vocab_size].to(torch.float32)
    target -= log_sums(target_local_max, target_local_sumexp, rows)
    draft = scaled_draft(draft_logits[..., :vocab_size], requests, steps, temp)
    draft -= log_sums(draft_local_max, draft_local_sumexp, rows)
    ratios = cumulative_log_p[rows - 1].exp().unsqueeze(1)
    residual = target.exp_().mul_(ratios).sub_(draft.exp_()).clamp_(min=0)
    for column, part in enumerate(blocks(residual, BLOCK_SIZE)):
        local_residual_mass[rows, column] = part.sum(1)


def log_ratios_before(
    log_ratios: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Return the logarithm, float32 [R, 1], of the ratio before each of these rows.

    ``steps`` [R] are the drafts of the same request before the row.
    """
    before = log_ratios[(rows - 1).clamp_(min=0)]
    return torch.where(steps > 0, before, 0).unsqueeze(1)


def residual_masses(
    log_ratios: torch.Tensor, target_log_probs: torch.Tensor, local: torch.Tensor | None
) -> torch.Tensor:
    """Return the mass, float32 [rows], of the residual of each row but a request's first.

    ``local`` [rows, blocks] holds the masses per block. It is None if the drafts are certain, and
    the ``target_log_probs`` [rows] of the drafts then give the mass.
    """
    if local is not None:
        return local.sum(1)
    return log_ratios.roll(1).exp() * (1 - target_log_probs.exp())


@compiled
def block_length(drafts, log_ratios, masses, uniforms):
    """Return the number of drafts that are accepted: all up to the last one that passes.

    Each argument has an entry per draft of a request. A negative draft ends the block.
    """
    length = 0
    for step in range(drafts.shape[0]):
        if drafts[step] < 0:
            break
        ratio = np.exp(log_ratios[step])
        chance = ratio
        if step + 1 < drafts.shape[0] and drafts[step + 1] >= 0:
            mass = masses[step + 1]
            whole = mass + _F1 - ratio
            chance = mass / whole if whole > _F0 else _F1
        if uniforms[step] <= chance:
            length = step + 1
    return length
