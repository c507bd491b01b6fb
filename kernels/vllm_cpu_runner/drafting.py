"""Kernels for a drafter's inputs, the drafts to verify, and the sampled tokens.

A row of a drafter that reads the target's hidden states (EAGLE, MTP), at position p, holds the
target's hidden state of p and the token of p + 1, and gives the logits of the token at p + 2.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys
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


@compiled
def _prefill(
    last_indices, draft_ids, draft_positions, draft_query_start_loc, draft_seq_lens, target_ids,
    target_positions, requests, last_sampled, next_prefill_tokens, num_sampled, num_rejected,
    query_start_loc, seq_lens, max_num_reqs,
):  # fmt: skip
    num_requests = requests.shape[0]
    for i in range(num_requests):
        first, end = query_start_loc[i], query_start_loc[i + 1] - num_rejected[i]
        for row in range(first, end - 1):
            draft_ids[row] = target_ids[row + 1]
        # Without a sampled token, this is a chunk of a prompt, which goes on after it.
        if num_sampled[i] > 0:
            draft_ids[end - 1] = last_sampled[requests[i]]
        else:
            draft_ids[end - 1] = next_prefill_tokens[requests[i]]
        for row in range(first, end):
            draft_positions[row] = target_positions[row]
        last_indices[i] = end - 1
        draft_query_start_loc[i] = first
        draft_seq_lens[i] = seq_lens[i]
    draft_query_start_loc[num_requests : max_num_reqs + 1] = query_start_loc[num_requests]
    draft_seq_lens[num_requests:max_num_reqs] = 0
    last_indices[num_requests:max_num_reqs] = 0


@implements("spec_decode.target_dependent_ar.speculator._prepare_prefill_inputs_kernel")
def prepare_prefill(
    last_token_indices, draft_current_step, draft_input_ids, draft_positions,
    draft_query_start_loc, draft_seq_lens, target_input_ids, target_positions, idx_mapping,
    last_sampled, next_prefill_tokens, num_sampled, num_rejected, query_start_loc, seq_lens,
    max_num_reqs,
):  # fmt: skip
    """Shift every request's tokens by one, and end them with the next one.

    The rows of rejected drafts come last in a request, and are not written.
    """
    draft_current_step.zero_()
    _prefill(
        *numpys(
            last_token_indices, draft_input_ids, draft_positions, draft_query_start_loc,
            draft_seq_lens, target_input_ids, target_positions, idx_mapping, last_sampled.view(-1),
            next_prefill_tokens.view(-1), num_sampled, num_rejected, query_start_loc, seq_lens,
        ),
        max_num_reqs,
    )  # fmt: skip


@compiled
def _decode(
    draft_tokens, target_seq_lens, num_rejected, input_ids, positions, sample_positions,
    query_start_loc, seq_lens, max_model_len, advance,
):  # fmt: skip
    num_requests = draft_tokens.shape[0]
    for i in range(num_requests):
        input_ids[i] = draft_tokens[i]
        sample_positions[i] += 1
        seq_lens[i] = target_seq_lens[i] - num_rejected[i]
        if advance:
            positions[i] = min(positions[i] + 1, max_model_len - 1)
            seq_lens[i] = min(seq_lens[i] + 1, max_model_len)
    for i in range(query_start_loc.shape[0]):
        query_start_loc[i] = min(i, num_requests)
    seq_lens[num_requests:] = 0


@implements("spec_decode.target_dependent_ar.speculator._prepare_decode_inputs_kernel")
def prepare_decode(
    draft_tokens, target_seq_lens, num_rejected, input_ids, positions, sample_src_positions,
    query_start_loc, seq_lens, max_model_len, max_num_reqs, ADVANCE_DRAFT_POSITIONS,
):  # fmt: skip
    """Give every request one row, with the first draft token."""
    _decode(
        *numpys(
            # A column of one row has another type than one of several.
            draft_tokens.contiguous(), target_seq_lens, num_rejected, input_ids, positions,
            sample_src_positions, query_start_loc[: max_num_reqs + 1], seq_lens[:max_num_reqs],
        ),
        max_model_len, ADVANCE_DRAFT_POSITIONS,
    )  # fmt: skip


@compiled
def _advance(draft_tokens, input_ids, positions, sample_positions, seq_lens, max_len, advance):
    for i in range(draft_tokens.shape[0]):
        input_ids[i] = draft_tokens[i]
        sample_positions[i] += 1
        if advance:
            positions[i] = min(positions[i] + 1, max_len - 1)
            seq_lens[i] = min(seq_lens[i] + 1, max_len)


@implements("spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel")
def update_inputs(
    output_draft_tokens, next_input_hidden_states, input_ids, positions, sample_src_positions,
    seq_lens, draft_tokens, current_draft_step, hidden_states, hidden_size, max_model_len,
    num_speculative_steps, ADVANCE_DRAFT_POSITIONS,
):  # fmt: skip
    """Note the drafts of a step and, unless it is the last one, prepare the rows of the next."""
    step, num_requests = int(current_draft_step), draft_tokens.shape[0]
    output_draft_tokens[:num_requests, step] = draft_tokens
    if step >= num_speculative_steps - 1:
        return
    # torch copies them, because NumPy has no bfloat16.
    next_input_hidden_states[:num_requests, :hidden_size] = hidden_states[:num_requests]
    _advance(
        *numpys(draft_tokens, input_ids, positions, sample_src_positions, seq_lens),
        max_model_len, ADVANCE_DRAFT_POSITIONS,
    )  # fmt: skip
