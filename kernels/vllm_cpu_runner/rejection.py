"""Kernels for vLLM's own rejection sampling of draft chains.

They exchange statistics per block of the vocabulary. Block verification and watermarks are refused.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dyntree_kernels.cpu import gumbel
from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import optional
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def _blocks(logits: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    return (logits[:, first : first + block] for first in range(0, logits.shape[1], block))


def _max_and_sumexp(
    logits: torch.Tensor, block: int, rows: torch.Tensor, maximum: torch.Tensor, sum_: torch.Tensor
) -> None:
    for column, part in enumerate(_blocks(logits, block)):
        top = part.amax(1)
        total = (part - top.unsqueeze(1)).exp_().sum(1)
        maximum[rows, column] = top
        sum_[rows, column] = total.masked_fill_(top.isneginf(), 0)


@implements("spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel")
def local_logits_stats(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    is_draft = expanded_local_pos_ptr < num_speculative_steps
    is_greedy = temp_ptr[expanded_idx_mapping_ptr] == 0
    greedy = (is_draft & is_greedy).nonzero().view(-1)
    if greedy.numel():
        for column, part in enumerate(_blocks(target_logits_ptr[greedy, :vocab_size], BLOCK_SIZE)):
            top, token = part.to(torch.float32).max(1)
            target_local_max_ptr[greedy, column] = top
            target_local_argmax_ptr[greedy, column] = token + column * BLOCK_SIZE
    rows = (is_draft & ~is_greedy).nonzero().view(-1)
    if rows.numel():
        target = target_logits_ptr[rows, :vocab_size].to(torch.float32)
        _max_and_sumexp(target, BLOCK_SIZE, rows, target_local_max_ptr, target_local_sumexp_ptr)
        if draft_logits_ptr is not None:
            requests = expanded_idx_mapping_ptr[rows]
            draft = draft_logits_ptr[requests, expanded_local_pos_ptr[rows].long(), :vocab_size]
            draft = draft.to(torch.float32) / temp_ptr[requests].unsqueeze(1)
            _max_and_sumexp(draft, BLOCK_SIZE, rows, draft_local_max_ptr, draft_local_sumexp_ptr)


@compiled
def _log_sum(maxima, sums):
    top = _NEG_INF
    for value in maxima:
        top = max(top, value)
    total = np.float32(0)
    for i in range(maxima.shape[0]):
        total += sums[i] * np.exp(maxima[i] - top)
    return top + np.log(total)


@compiled
def _first_maximum(values):
    best, best_value = 0, _NEG_INF
    for i in range(values.shape[0]):
        if values[i] > best_value:
            best, best_value = i, values[i]
    return best


@compiled
def _reject(
    sampled,
    accepted_lengths,
    target_lse_out,
    draft_lse_out,
    target_logits,
    draft_logits,
    target_argmax,
    target_max,
    target_sum,
    drafts,
    draft_max,
    draft_sum,
    cu_num_logits,
    requests,
    temperatures,
    seeds,
    positions,
    rates,
):
    """Accept the drafts of each request before the first rejected one.

    target_logits and draft_logits [rows] are the logits of the draft that each row verifies.
    """
    for i in range(requests.shape[0]):
        request, first = requests[i], cu_num_logits[i]
        temperature, accepted_length = temperatures[request], 0
        target_lse = draft_lse = np.float32(0)
        for step in range(cu_num_logits[i + 1] - first - 1):
            row, token = first + step, drafts[first + step + 1]
            u = _uniform(seeds[request], positions[row])
            if temperature == 0:
                best = target_argmax[row, _first_maximum(target_max[row])]
                accepted = token >= 0 and (u < rates[step] if rates.size else best == token)
                sampled[i, step] = token if accepted else best
            elif token < 0:
                accepted = False
            else:
                target_lse = _log_sum(target_max[row], target_sum[row])
                draft_logprob = np.float32(0)
                if draft_logits.size:
                    draft_lse = _log_sum(draft_max[row], draft_sum[row])
                    draft_logprob = draft_logits[row] / temperature - draft_lse
                if rates.size:
                    accepted = u < rates[step]
                else:
                    accepted = target_logits[row] - target_lse > np.log(u) + draft_logprob
                sampled[i, step] = token
            if not accepted:
                break
            accepted_length += 1
        accepted_lengths[i] = accepted_length
        target_lse_out[i], draft_lse_out[i] = target_lse, draft_lse


@implements("spec_decode.rejection_sampler_utils._rejection_kernel")
def rejection(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
) -> None:
    tokens = draft_sampled_ptr.roll(-1).clamp_(min=0).long()
    target_logits = target_logits_ptr.gather(1, tokens.unsqueeze(1)).view(-1).to(torch.float32)
    draft_logits = None
    if draft_logits_ptr is not None:
        counts = cu_num_logits_ptr.diff()
        steps = torch.arange(tokens.shape[0]) - cu_num_logits_ptr[:-1].repeat_interleave(counts)
        # Only a bonus row, which verifies no draft, can be at a step beyond the last.
        steps.clamp_(max=draft_logits_ptr.shape[1] - 1)
        owners = idx_mapping_ptr.repeat_interleave(counts)
        draft_logits = draft_logits_ptr[owners, steps, tokens].to(torch.float32)
    _reject(
        sampled_ptr.numpy(),
        rejected_steps_ptr.numpy(),
        target_rejected_logsumexp_ptr.numpy(),
        draft_rejected_logsumexp_ptr.numpy(),
        target_logits.numpy(),
        optional(draft_logits, np.float32),
        target_local_argmax_ptr.numpy(),
        target_local_max_ptr.numpy(),
        target_local_sumexp_ptr.numpy(),
        draft_sampled_ptr.numpy(),
        draft_local_max_ptr.numpy(),
        draft_local_sumexp_ptr.numpy(),
        cu_num_logits_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        temp_ptr.numpy(),
        seed_ptr.numpy(),
        pos_ptr.numpy(),
        optional(synthetic_conditional_rates_ptr, np.float32),
    )


@implements("spec_decode.rejection_sampler_utils._resample_kernel")
def resample(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
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
        owners = requests[rejected]
        draft = draft_logits_ptr[owners, steps[rejected], :vocab_size].to(torch.float32)
        draft = draft / temp_ptr[owners].unsqueeze(1)
        draft -= draft_rejected_logsumexp_ptr[rejected].unsqueeze(1)
        target = residual[rejected] - target_rejected_logsumexp_ptr[rejected].unsqueeze(1)
        ratio = (draft - target).exp_()
        log_residual = target + torch.log1p(-ratio)
        residual[rejected] = log_residual.masked_fill_(~(ratio < 1), float("-inf"))
    gumbel.sample_blocks(
        resampled_local_argmax_ptr,
        resampled_local_max_ptr,
        residual,
        requests,
        temp_ptr,
        seed_ptr,
        pos_ptr[rows],
        block=BLOCK_SIZE,
        divide=False,
    )


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
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    _insert(
        sampled_ptr.numpy(),
        num_sampled_ptr.numpy(),
        resampled_local_argmax_ptr.numpy(),
        resampled_local_max_ptr.numpy(),
        cu_num_logits_ptr.numpy(),
        expanded_idx_mapping_ptr.numpy(),
        temp_ptr.numpy(),
    )
