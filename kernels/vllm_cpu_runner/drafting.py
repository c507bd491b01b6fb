"""Kernels for a draft model's inputs, the drafts to verify, and the sampled tokens."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.registry import implements


@implements("spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel")
@compiled
def prepare_draft_prefill(
    target_input_ids, target_positions, last_sampled, idx_mapping, out_input_ids, out_positions,
    last_token_indices, out_query_start_loc, out_seq_lens, query_start_loc, seq_lens, num_rejected,
    max_num_reqs, max_model_len,
):  # fmt: skip
    num_requests, end, sampled = idx_mapping.shape[0], 0, last_sampled.reshape(-1)
    for i in range(num_requests):
        first = query_start_loc[i]
        query_len = query_start_loc[i + 1] - first
        num_valid = query_len - num_rejected[i]
        begin = first + i
        for j in range(query_len + 1):
            token = 0  # for the slot of a rejected draft
            if j < num_valid:
                token = target_input_ids[first + j]
            elif j == num_valid:
                token = sampled[idx_mapping[i]]
            out_input_ids[begin + j] = token
            out_positions[begin + j] = min(target_positions[first] + j, max_model_len - 1)
        last_token_indices[i] = begin + num_valid
        out_query_start_loc[i] = begin
        out_seq_lens[i] = min(seq_lens[i] + 1, max_model_len)
        end = begin + query_len + 1
    out_query_start_loc[num_requests : max_num_reqs + 1] = end
    out_seq_lens[num_requests:max_num_reqs] = 0
    last_token_indices[num_requests:max_num_reqs] = 0


@implements("spec_decode.rejection_sampler._gather_draft_sampled_kernel", "num_logits")
@compiled
def gather_draft_sampled(
    draft_sampled, pos, input_ids, positions, logits_indices, expanded_idx_mapping,
    expanded_local_pos, prefill_len,
):  # fmt: skip
    for row in range(draft_sampled.shape[0]):
        at, local = logits_indices[row], expanded_local_pos[row]
        pos[row] = positions[at]
        # While a request's first row is a token of the prefill, its draft slots hold placeholders.
        first = positions[at] - local
        is_placeholder = local > 0 and first < prefill_len[expanded_idx_mapping[row]]
        draft_sampled[row] = -1 if is_placeholder else input_ids[at]


@implements("spec_decode.rejection_sampler._flatten_sampled_kernel")
@compiled
def flatten_sampled(flat_sampled, sampled, num_sampled, cu_num_logits):
    for i in range(num_sampled.shape[0]):
        for j in range(num_sampled[i]):
            flat_sampled[cu_num_logits[i] + j] = sampled[i, j]
