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


@implements("spec_decode.rejection_sampler_utils._rejection_kernel")
def rejection(
    sampled_ptr: torch.Tensor, sampled_stride: int, rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor, draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor, target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor, target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor, target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor, target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor, draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int, draft_logits_stride_1: int, draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int, draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int, cu_num_logits_ptr: torch.Tensor, idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor, seed_ptr: torch.Tensor, pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None, cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None, local_residual_mass_stride: int,
    vocab_num_blocks: int, PADDED_VOCAB_NUM_BLOCKS: int, HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool, USE_BLOCK_VERIFICATION: bool,
) -> None:  # fmt: skip
    sums = Sums(
        target_local_max_ptr, target_local_sumexp_ptr, draft_local_max_ptr, draft_local_sumexp_ptr
    )
    of_target, of_draft = drafted_log_probs(
        target_logits_ptr, draft_logits_ptr, sums, draft_sampled_ptr, cu_num_logits_ptr,
        idx_mapping_ptr, temp_ptr,
    )  # fmt: skip
    masses = None
    if cumulative_log_p_ptr is not None:
        masses = residual_masses(cumulative_log_p_ptr, of_target, local_residual_mass_ptr)
    _reject(
        *numpys(
            sampled_ptr, rejected_steps_ptr, target_rejected_logsumexp_ptr,
            draft_rejected_logsumexp_ptr, target_local_argmax_ptr,
        ),
        *(each.numpy() for each in sums),
        *numpys(draft_sampled_ptr, cu_num_logits_ptr, idx_mapping_ptr, temp_ptr, seed_ptr, pos_ptr),
        optional(synthetic_conditional_rates_ptr, np.float32), of_target.numpy(), of_draft.numpy(),
        optional(cumulative_log_p_ptr, np.float32), optional(masses, np.float32),
    )  # fmt: skip


@implements("spec_decode.rejection_sampler_utils._resample_kernel")
def resample(
    resampled_local_argmax_ptr: torch.Tensor, resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor, resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor, target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor, draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int, draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor, rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor, expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor, temp_ptr: torch.Tensor, seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor, cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None, contexts_stride: int, watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None, watermark_key_0: int, watermark_key_1: int,
    vocab_size: int, BLOCK_SIZE: int, HAS_DRAFT_LOGITS: bool, USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool, CONTEXT_WIDTH: int, WATERMARK: bool, DEDUPLICATE_CONTEXTS: bool,
) -> None:  # fmt: skip
    """Sample each request's token after its accepted drafts, per block of the vocabulary.

    Greedy requests that rejected a draft are sampled too, but the result is not read.
    """
    if WATERMARK:
        raise NotImplementedError("watermarking is not supported by the CPU model runner")
    rows = (cu_num_logits_ptr[:-1] + rejected_step_ptr).long()
    requests, steps = expanded_idx_mapping_ptr[rows], rejected_step_ptr.long()
    residual = target_logits_ptr[rows, :vocab_size].to(torch.float32)
    is_bonus = rows == cu_num_logits_ptr[1:] - 1
    token = draft_sampled_ptr[(rows + 1).clamp_(max=draft_sampled_ptr.shape[0] - 1)].long()
    rejected = (~is_bonus & (token >= 0) & (temp_ptr[requests] != 0)).nonzero().view(-1)
    if rejected.numel() and draft_logits_ptr is None:
        residual[rejected, token[rejected]] = float("-inf")
    elif rejected.numel() and draft_logits_ptr is not None:
        draft = scaled_draft(
            draft_logits_ptr[..., :vocab_size], requests[rejected], steps[rejected], temp_ptr
        )
        draft -= draft_rejected_logsumexp_ptr[rejected].unsqueeze(1)
        target = residual[rejected] - target_rejected_logsumexp_ptr[rejected].unsqueeze(1)
        if cumulative_log_p_ptr is not None:
            target += log_ratios_before(cumulative_log_p_ptr, rows[rejected], steps[rejected])
        ratio = (draft - target).exp_()
        log_residual = target + torch.log1p(-ratio)
        residual[rejected] = log_residual.masked_fill_(~(ratio < 1), float("-inf"))
    gumbel.sample_blocks(
        resampled_local_argmax_ptr, resampled_local_max_ptr, residual, requests, temp_ptr, seed_ptr,
        pos_ptr[rows], block=BLOCK_SIZE, divide=False,
    )  # fmt: skip


@compiled
def _insert(sampled, num_sampled, argmax, maximum, cu_num_logits, requests, temperatures):
    for i in range(num_sampled.shape[0]):
        count = num_sampled[i]
        row = cu_num_logits[i] + count
        is_bonus = row == cu_num_logits[i + 1] - 1
        # For a greedy request that rejected a draft, the target's argmax is already there.
        if is_bonus or temperatures[requests[row]] != 0:
            sampled[i, count] = argmax[i, _first_maximum(maximum[i])]
        num_sampled[i] = count + 1


@implements("spec_decode.rejection_sampler_utils._insert_resampled_kernel")
def insert_resampled(
    sampled_ptr: torch.Tensor, sampled_stride: int, num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor, resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor, resampled_local_max_stride: int,
    resample_num_blocks: int, cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor, temp_ptr: torch.Tensor, PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:  # fmt: skip
    _insert(
        *numpys(
            sampled_ptr, num_sampled_ptr, resampled_local_argmax_ptr, resampled_local_max_ptr,
            cu_num_logits_ptr, expanded_idx_mapping_ptr, temp_ptr,
        ),
    )  # fmt: skip
