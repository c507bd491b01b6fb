"""Kernels for the input batch: token IDs, positions, sequence lengths and request state."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys, optional
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import torch


@compiled
def _prefill(input_ids, lookahead, requests, query_start_loc, token_ids, prefill_lens, computed):
    for i in range(requests.shape[0]):
        request = requests[i]
        done, total = computed[request], prefill_lens[request]
        if done >= total:
            continue
        first, last = query_start_loc[i], query_start_loc[i + 1]
        for j in range(last - first):
            input_ids[first + j] = token_ids[request, done + j]
        for j in range(lookahead.shape[0]):
            at = done + last - first + j
            lookahead[j, request] = token_ids[request, at] if at < total else 0


@implements("input_batch._prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor, next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int, num_lookahead: int, idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor, all_token_ids_ptr: torch.Tensor, all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:  # fmt: skip
    _prefill(
        *numpys(
            input_ids_ptr, next_prefill_tokens_ptr, idx_mapping_ptr, query_start_loc_ptr,
            all_token_ids_ptr, prefill_lens_ptr, num_computed_tokens_ptr,
        ),
    )  # fmt: skip


@compiled
def _positions(positions, seq_lens, requests, query_start_loc, computed):
    num_requests = requests.shape[0]
    for i in range(num_requests):
        done = computed[requests[i]]
        first, last = query_start_loc[i], query_start_loc[i + 1]
        seq_lens[i] = done + last - first
        for j in range(last - first):
            positions[first + j] = done + j
    seq_lens[num_requests:] = 0


@implements("input_batch._prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor, seq_lens_ptr: torch.Tensor, idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _positions(
        *numpys(
            pos_ptr, seq_lens_ptr[:max_num_reqs], idx_mapping_ptr, query_start_loc_ptr,
            num_computed_tokens_ptr,
        ),
    )  # fmt: skip


@compiled
def _rope_positions(
    positions, prompt_positions, deltas, requests, query_start_loc, prefill_lens, computed
):
    axes = positions.shape[0]
    for i in range(requests.shape[0]):
        request = requests[i]
        done = computed[request]
        first, last = query_start_loc[i], query_start_loc[i + 1]
        for axis in range(axes):
            for j in range(last - first):
                if done < prefill_lens[request]:
                    found = prompt_positions[axes * request + axis, done + j]
                else:
                    found = done + j + deltas[request]
                positions[axis, first + j] = found


@implements("mm.rope._prepare_rope_positions_kernel")
def prepare_rope_positions(
    positions_ptr: torch.Tensor, positions_stride: int, prefill_positions_ptr: torch.Tensor,
    prefill_positions_stride0: int, prefill_positions_stride1: int, prefill_delta_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor,
    prefill_lens_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, BLOCK_SIZE: int,
    NUM_DIMS: int,
) -> None:  # fmt: skip
    _rope_positions(
        *numpys(
            positions_ptr, prefill_positions_ptr, prefill_delta_ptr, idx_mapping_ptr,
            query_start_loc_ptr, prefill_lens_ptr, num_computed_tokens_ptr,
        ),
    )  # fmt: skip


@compiled
def _combine(
    input_ids, requests, last_sampled, query_start_loc, seq_lens, prefill_lens, draft_tokens,
    cu_num_logits, logits_indices, new_tokens,
):  # fmt: skip
    for i in range(requests.shape[0]):
        request = requests[i]
        num_logits = cu_num_logits[i + 1] - cu_num_logits[i]
        end = query_start_loc[i + 1]
        for j in range(num_logits):
            logits_indices[cu_num_logits[i] + j] = end - num_logits + j
        if seq_lens[i] <= prefill_lens[request]:
            continue
        # Rows within the prompt keep their prompt tokens.
        if new_tokens > 0 and seq_lens[i] - num_logits >= prefill_lens[request]:
            input_ids[end - num_logits] = last_sampled[request]
        num_drafts = num_logits - new_tokens
        for j in range(num_drafts):
            input_ids[end - num_drafts + j] = draft_tokens[request, j]


@implements("input_batch._combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor, idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor, prefill_len_ptr: torch.Tensor, draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int, cu_num_logits_ptr: torch.Tensor, logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int, NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:  # fmt: skip
    _combine(
        *numpys(input_ids_ptr, idx_mapping_ptr, last_sampled_tokens_ptr.view(-1),
        query_start_loc_ptr, seq_lens_ptr, prefill_len_ptr, draft_tokens_ptr, cu_num_logits_ptr,
        logits_indices_ptr), NUM_NEW_SAMPLED_TOKENS,
    )  # fmt: skip


@compiled
def _count_rejected(num_sampled, num_rejected, seq_lens, cu_num_logits, requests, prefill_lens):
    for i in range(requests.shape[0]):
        if seq_lens[i] < prefill_lens[requests[i]]:
            num_sampled[i] = num_rejected[i] = 0
        else:
            num_rejected[i] = cu_num_logits[i + 1] - cu_num_logits[i] - num_sampled[i]


@implements("input_batch._get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor, num_rejected_ptr: torch.Tensor, seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor, idx_mapping_ptr: torch.Tensor, prefill_len_ptr: torch.Tensor,
) -> None:  # fmt: skip
    _count_rejected(
        *numpys(
            num_sampled_ptr, num_rejected_ptr, seq_lens_ptr, cu_num_logits_ptr, idx_mapping_ptr,
            prefill_len_ptr,
        ),
    )  # fmt: skip


@compiled
def _append_sampled(
    requests, computed, last_sampled, bin_counts, sampled, num_sampled, num_rejected,
    query_start_loc, token_ids, total_lens,
):  # fmt: skip
    for i in range(requests.shape[0]):
        request = requests[i]
        if request < 0:
            continue
        count, length = num_sampled[i], total_lens[request]
        for j in range(count):
            token = sampled[i, j]
            token_ids[request, length + j] = token
            if bin_counts.shape[0] > 0:
                bin_counts[request, token] += 1
        if count > 0:
            last_sampled[request] = sampled[i, count - 1]
            total_lens[request] = length + count
        query_len = 0
        if query_start_loc.shape[0] > 0:
            query_len = query_start_loc[i + 1] - query_start_loc[i]
        computed[request] += query_len - num_rejected[i]


@implements("input_batch._post_update_kernel")
def post_update(
    idx_mapping_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor, output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int, sampled_tokens_ptr: torch.Tensor, sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor, num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None, all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int, total_len_ptr: torch.Tensor,
) -> None:  # fmt: skip
    _append_sampled(
        *numpys(idx_mapping_ptr, num_computed_tokens_ptr, last_sampled_tokens_ptr.view(-1)),
        optional(output_bin_counts_ptr, np.int32, 2),
        *numpys(sampled_tokens_ptr, num_sampled_ptr, num_rejected_ptr),
        optional(query_start_loc_ptr, np.int32), all_token_ids_ptr.numpy(), total_len_ptr.numpy(),
    )  # fmt: skip


@compiled
def _advance(requests, computed, query_start_loc):
    for i in range(requests.shape[0]):
        computed[requests[i]] += query_start_loc[i + 1] - query_start_loc[i]


@implements("input_batch._post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
) -> None:
    _advance(idx_mapping_ptr.numpy(), num_computed_tokens_ptr.numpy(), query_start_loc_ptr.numpy())


@compiled
def _expand(requests, expanded_requests, local_positions, cu_num_logits):
    for i in range(requests.shape[0]):
        for j in range(cu_num_logits[i + 1] - cu_num_logits[i]):
            expanded_requests[cu_num_logits[i] + j] = requests[i]
            local_positions[cu_num_logits[i] + j] = j


@implements("input_batch._expand_idx_mapping_kernel")
def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor, expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor, cu_num_logits_ptr: torch.Tensor, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _expand(
        *numpys(
            idx_mapping_ptr, expanded_idx_mapping_ptr, expanded_local_pos_ptr, cu_num_logits_ptr,
        ),
    )  # fmt: skip
