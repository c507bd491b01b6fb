"""Kernels for vLLM's own rejection sampling of draft chains.

They verify drafts one by one or, with the kernels of `block_verification`, as a block. Watermarks
are refused.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import numpy as np
import torch

from dyntree_kernels.cpu import gumbel
from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys, optional
from vllm_cpu_runner.block_verification import block_length, log_ratios_before, residual_masses
from vllm_cpu_runner.registry import implements
from vllm_cpu_runner.rejection_stats import Sums, drafted_log_probs, log_sum, scaled_draft

_NEG_INF = np.float32(-np.inf)
_SMALLEST_UNIFORM = np.float32(4.6566127342e-10)  # _TL_RAND_MIN of vLLM's gumbel.py
_UNIFORM_SCALE = np.float32(4.6566127342e-10)
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


@compiled
def _uniform(seed, offset):
    """Return a float32 in (0, 1): the first word of Philox4x32-10, scaled as by ``tl.rand``."""
    c0, c1 = np.uint64(offset) & _LOW32, np.uint64(offset) >> _SHIFT32
    c2 = c3 = np.uint64(0)
    k0, k1 = np.uint64(seed) & _LOW32, np.uint64(seed) >> _SHIFT32
    for _ in range(10):
        b = np.uint64(0xCD9E8D57) * c2
        a = np.uint64(0xD2511F53) * c0
        c0, c1 = (b >> _SHIFT32) ^ c1 ^ k0, b & _LOW32
        c2, c3 = (a >> _SHIFT32) ^ c3 ^ k1, a & _LOW32
        k0 = (k0 + np.uint64(0x9E3779B9)) & _LOW32
        k1 = (k1 + np.uint64(0xBB67AE85)) & _LOW32
    word = np.int32(np.uint32(c0))
    return max(np.float32(~word if word < 0 else word) * _UNIFORM_SCALE, _SMALLEST_UNIFORM)


@compiled
def _first_maximum(values):
    best, best_value = 0, _NEG_INF
    for i in range(values.shape[0]):
        if values[i] > best_value:
            best, best_value = i, values[i]
    return best


@compiled
def _uniforms(seed, positions):
    uniforms = np.empty(positions.shape[0], np.float32)
    for row in range(positions.shape[0]):
        uniforms[row] = _uniform(seed, positions[row])
    return uniforms


@compiled
def _greedy_length(drafts, best, uniforms, rates):
    for step in range(drafts.shape[0]):
        passed = uniforms[step] < rates[step] if rates.size else drafts[step] == best[step]
        if drafts[step] < 0 or not passed:
            return step
    return drafts.shape[0]


@compiled
def _standard_length(drafts, target_log_probs, draft_log_probs, uniforms, rates):
    for step in range(drafts.shape[0]):
        if drafts[step] < 0:
            return step
        if rates.size:
            passed = uniforms[step] < rates[step]
        else:
            passed = target_log_probs[step] > np.log(uniforms[step]) + draft_log_probs[step]
        if not passed:
            return step
    return drafts.shape[0]


@compiled
def _reject(
    sampled, accepted_lengths, target_lse, draft_lse, target_argmax, target_max, target_sum,
    draft_max, draft_sum, drafts, cu_num_logits, requests, temperatures, seeds, positions, rates,
    target_log_probs, draft_log_probs, log_ratios, masses,
):  # fmt: skip
    """Accept drafts of each request, and prepare the sampling of the token after them.

    target_log_probs and draft_log_probs [rows] are those of the draft that each row verifies.
    log_ratios and masses [rows] are empty unless drafts are verified as a block.
    """
    for i in range(requests.shape[0]):
        request, first, bonus = requests[i], cu_num_logits[i], cu_num_logits[i + 1] - 1
        chain = drafts[first + 1 : bonus + 1]
        uniforms = _uniforms(seeds[request], positions[first:bonus])
        best = np.empty(bonus - first, np.int64)
        if temperatures[request] == 0:
            for row in range(first, bonus):
                best[row - first] = target_argmax[row, _first_maximum(target_max[row])]
            length = _greedy_length(chain, best, uniforms, rates)
        elif log_ratios.size:
            length = block_length(chain, log_ratios[first:bonus], masses[first:bonus], uniforms)
        else:
            of_target, of_draft = target_log_probs[first:bonus], draft_log_probs[first:bonus]
            length = _standard_length(chain, of_target, of_draft, uniforms, rates)
        accepted_lengths[i] = length
        sampled[i, :length] = chain[:length]
        rejected = first + length
        if rejected == bonus:
            continue
        if temperatures[request] == 0:
            sampled[i, length] = best[length]
        else:
            target_lse[i] = log_sum(target_max[rejected], target_sum[rejected])
            # Without logits of the draft this has no meaning and is not read.
            draft_lse[i] = log_sum(draft_max[rejected], draft_sum[rejected])


@implements(
    "spec_decode.rejection_sampler_utils._rejection_kernel",
    "vocab_num_blocks HAS_DRAFT_LOGITS SYNTHETIC_MODE USE_BLOCK_VERIFICATION",
)
def rejection(
    sampled: torch.Tensor, rejected_steps: torch.Tensor, target_rejected_logsumexp: torch.Tensor,
    draft_rejected_logsumexp: torch.Tensor, target_logits: torch.Tensor,
    target_local_argmax: torch.Tensor, target_local_max: torch.Tensor,
    target_local_sumexp: torch.Tensor, draft_sampled: torch.Tensor,
    draft_logits: torch.Tensor | None, draft_local_max: torch.Tensor,
    draft_local_sumexp: torch.Tensor, cu_num_logits: torch.Tensor, idx_mapping: torch.Tensor,
    temp: torch.Tensor, seed: torch.Tensor, pos: torch.Tensor,
    synthetic_conditional_rates: torch.Tensor | None, cumulative_log_p: torch.Tensor | None,
    local_residual_mass: torch.Tensor | None,
) -> None:  # fmt: skip
    sums = Sums(target_local_max, target_local_sumexp, draft_local_max, draft_local_sumexp)
    of_target, of_draft = drafted_log_probs(
        target_logits, draft_logits, sums, draft_sampled, cu_num_logits, idx_mapping, temp
    )
    masses = None
    if cumulative_log_p is not None:
        masses = residual_masses(cumulative_log_p, of_target, local_residual_mass)
    _reject(
        *numpys(
            sampled, rejected_steps, target_rejected_logsumexp, draft_rejected_logsumexp,
            target_local_argmax,
        ),
        *(each.numpy() for each in sums),
        *numpys(draft_sampled, cu_num_logits, idx_mapping, temp, seed, pos),
        optional(synthetic_conditional_rates, np.float32), of_target.numpy(), of_draft.numpy(),
        optional(cumulative_log_p, np.float32), optional(masses, np.float32),
    )  # fmt: skip


@implements(
    "spec_decode.rejection_sampler_utils._resample_kernel",
    "contexts watermarking watermarking_skip_mask watermark_key_0 watermark_key_1 HAS_DRAFT_LOGITS "
    "USE_FP64 USE_BLOCK_VERIFICATION CONTEXT_WIDTH DEDUPLICATE_CONTEXTS",
)
def resample(
    resampled_local_argmax: torch.Tensor, resampled_local_max: torch.Tensor,
    target_logits: torch.Tensor, target_rejected_logsumexp: torch.Tensor,
    draft_logits: torch.Tensor | None, draft_rejected_logsumexp: torch.Tensor,
    rejected_step: torch.Tensor, cu_num_logits: torch.Tensor, expanded_idx_mapping: torch.Tensor,
    draft_sampled: torch.Tensor, temp: torch.Tensor, seed: torch.Tensor, pos: torch.Tensor,
    cumulative_log_p: torch.Tensor | None, vocab_size: int, BLOCK_SIZE: int, WATERMARK: bool,
) -> None:  # fmt: skip
    """Sample each request's token after its accepted drafts, per block of the vocabulary.

    Greedy requests that rejected a draft are sampled too, but the result is not read.
    """
    if WATERMARK:
        raise NotImplementedError("watermarking is not supported by the CPU model runner")
    rows = (cu_num_logits[:-1] + rejected_step).long()
    requests, steps = expanded_idx_mapping[rows], rejected_step.long()
    residual = target_logits[rows, :vocab_size].to(torch.float32)
    is_bonus = rows == cu_num_logits[1:] - 1
    token = draft_sampled[(rows + 1).clamp_(max=draft_sampled.shape[0] - 1)].long()
    rejected = (~is_bonus & (token >= 0) & (temp[requests] != 0)).nonzero().view(-1)
    if rejected.numel() and draft_logits is None:
        residual[rejected, token[rejected]] = float("-inf")
    elif rejected.numel() and draft_logits is not None:
        draft = scaled_draft(
            draft_logits[..., :vocab_size], requests[rejected], steps[rejected], temp
        )
        draft -= draft_rejected_logsumexp[rejected].unsqueeze(1)
        target = residual[rejected] - target_rejected_logsumexp[rejected].unsqueeze(1)
        if cumulative_log_p is not None:
            target += log_ratios_before(cumulative_log_p, rows[rejected], steps[rejected])
        ratio = (draft - target).exp_()
        log_residual = target + torch.log1p(-ratio)
        residual[rejected] = log_residual.masked_fill_(~(ratio < 1), float("-inf"))
    gumbel.sample_blocks(
        resampled_local_argmax, resampled_local_max, residual, requests, temp, seed,
        pos[rows], block=BLOCK_SIZE, divide=False,
    )  # fmt: skip


@implements("spec_decode.rejection_sampler_utils._insert_resampled_kernel", "resample_num_blocks")
@compiled
def insert_resampled(
    sampled, num_sampled, resampled_local_argmax, resampled_local_max, cu_num_logits,
    expanded_idx_mapping, temp,
):  # fmt: skip
    for i in range(num_sampled.shape[0]):
        count = num_sampled[i]
        row = cu_num_logits[i] + count
        is_bonus = row == cu_num_logits[i + 1] - 1
        # For a greedy request that rejected a draft, the target's argmax is already there.
        if is_bonus or temp[expanded_idx_mapping[row]] != 0:
            best = _first_maximum(resampled_local_max[i])
            sampled[i, count] = resampled_local_argmax[i, best]
        num_sampled[i] = count + 1
