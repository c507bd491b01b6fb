"""Kernels for the input batch: token IDs, positions, sequence lengths and request state."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys, optional
from vllm_cpu_runner.registry import implements


@implements("input_batch._prepare_prefill_inputs_kernel", "num_lookahead LOOKAHEAD_BLOCK")
@compiled
def prepare_prefill_inputs(
    input_ids, next_prefill_tokens, idx_mapping, query_start_loc, all_token_ids, prefill_lens,
    num_computed_tokens,
):  # fmt: skip
    for i in range(idx_mapping.shape[0]):
        request = idx_mapping[i]
        done, total = num_computed_tokens[request], prefill_lens[request]
        if done >= total:
            continue
        first, last = query_start_loc[i], query_start_loc[i + 1]
        for j in range(last - first):
            input_ids[first + j] = all_token_ids[request, done + j]
        for j in range(next_prefill_tokens.shape[0]):
            at = done + last - first + j
            next_prefill_tokens[j, request] = all_token_ids[request, at] if at < total else 0


@implements("input_batch._prepare_pos_seq_lens_kernel")
@compiled
def prepare_pos_seq_lens(
    pos, seq_lens, idx_mapping, query_start_loc, num_computed_tokens, max_num_reqs
):
    num_requests = idx_mapping.shape[0]
    for i in range(num_requests):
        done = num_computed_tokens[idx_mapping[i]]
        first, last = query_start_loc[i], query_start_loc[i + 1]
        seq_lens[i] = done + last - first
        for j in range(last - first):
            pos[first + j] = done + j
    seq_lens[num_requests:max_num_reqs] = 0


@implements("mm.rope._prepare_rope_positions_kernel", "NUM_DIMS")
@compiled
def prepare_rope_positions(
    positions, prefill_positions, prefill_delta, idx_mapping, query_start_loc, prefill_lens,
    num_computed_tokens,
):  # fmt: skip
    axes = positions.shape[0]
    for i in range(idx_mapping.shape[0]):
        request = idx_mapping[i]
        done = num_computed_tokens[request]
        first, last = query_start_loc[i], query_start_loc[i + 1]
        for axis in range(axes):
            for j in range(last - first):
                if done < prefill_lens[request]:
                    found = prefill_positions[axes * request + axis, done + j]
                else:
                    found = done + j + prefill_delta[request]
                positions[axis, first + j] = found


@implements("input_batch._combine_sampled_and_draft_tokens_kernel")
@compiled
def combine_sampled_and_draft_tokens(
    input_ids, idx_mapping, last_sampled_tokens, query_start_loc, seq_lens, prefill_len,
    draft_tokens, cu_num_logits, logits_indices, NUM_NEW_SAMPLED_TOKENS=1,
):  # fmt: skip
    new_tokens = NUM_NEW_SAMPLED_TOKENS
    for i in range(idx_mapping.shape[0]):
        request = idx_mapping[i]
        num_logits = cu_num_logits[i + 1] - cu_num_logits[i]
        end = query_start_loc[i + 1]
        for j in range(num_logits):
            logits_indices[cu_num_logits[i] + j] = end - num_logits + j
        if seq_lens[i] <= prefill_len[request]:
            continue
        # Rows within the prompt keep their prompt tokens.
        if new_tokens > 0 and seq_lens[i] - num_logits >= prefill_len[request]:
            input_ids[end - num_logits] = last_sampled_tokens[request, 0]
        num_drafts = num_logits - new_tokens
        for j in range(num_drafts):
            input_ids[end - num_drafts + j] = draft_tokens[request, j]


@implements("input_batch._get_num_sampled_and_rejected_kernel")
@compiled
def get_num_sampled_and_rejected(
    num_sampled, num_rejected, seq_lens, cu_num_logits, idx_mapping, prefill_len
):
    for i in range(idx_mapping.shape[0]):
        if seq_lens[i] < prefill_len[idx_mapping[i]]:
            num_sampled[i] = num_rejected[i] = 0
        else:
            num_rejected[i] = cu_num_logits[i + 1] - cu_num_logits[i] - num_sampled[i]


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
    idx_mapping, num_computed_tokens, last_sampled_tokens, output_bin_counts, sampled_tokens,
    num_sampled, num_rejected, query_start_loc, all_token_ids, total_len,
):  # fmt: skip
    _append_sampled(
        *numpys(idx_mapping, num_computed_tokens, last_sampled_tokens.view(-1)),
        optional(output_bin_counts, np.int32, 2),
        *numpys(sampled_tokens, num_sampled, num_rejected),
        optional(query_start_loc, np.int32), *numpys(all_token_ids, total_len),
    )  # fmt: skip


@implements("input_batch._post_update_num_computed_tokens_kernel")
@compiled
def post_update_num_computed_tokens(idx_mapping, num_computed_tokens, query_start_loc):
    for i in range(idx_mapping.shape[0]):
        num_computed_tokens[idx_mapping[i]] += query_start_loc[i + 1] - query_start_loc[i]


@implements("input_batch._expand_idx_mapping_kernel")
@compiled
def expand_idx_mapping(idx_mapping, expanded_idx_mapping, expanded_local_pos, cu_num_logits):
    for i in range(idx_mapping.shape[0]):
        for j in range(cu_num_logits[i + 1] - cu_num_logits[i]):
            expanded_idx_mapping[cu_num_logits[i] + j] = idx_mapping[i]
            expanded_local_pos[cu_num_logits[i] + j] = j
