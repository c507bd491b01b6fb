"""Kernels for a draft model's inputs, the drafts to verify, and the sampled tokens."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import torch


@compiled
def _draft_prefill(
    target_ids, target_positions, last_sampled, requests, draft_ids, draft_positions, last_indices,
    draft_query_start_loc, draft_seq_lens, query_start_loc, seq_lens, num_rejected, max_model_len,
):  # fmt: skip
    num_requests, end = requests.shape[0], 0
    for i in range(num_requests):
        first = query_start_loc[i]
        query_len = query_start_loc[i + 1] - first
        num_valid = query_len - num_rejected[i]
        begin = first + i
        for j in range(query_len + 1):
            token = 0  # for the slot of a rejected draft
            if j < num_valid:
                token = target_ids[first + j]
            elif j == num_valid:
                token = last_sampled[requests[i]]
            draft_ids[begin + j] = token
            draft_positions[begin + j] = min(target_positions[first] + j, max_model_len - 1)
        last_indices[i] = begin + num_valid
        draft_query_start_loc[i] = begin
        draft_seq_lens[i] = min(seq_lens[i] + 1, max_model_len)
        end = begin + query_len + 1
    draft_query_start_loc[num_requests:] = end
    draft_seq_lens[num_requests:] = 0
    last_indices[num_requests:] = 0


@implements("spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel")
def prepare_draft_prefill(
    target_input_ids_ptr: torch.Tensor, target_positions_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor, idx_mapping_ptr: torch.Tensor, out_input_ids_ptr: torch.Tensor,
    out_positions_ptr: torch.Tensor, last_token_indices_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor, out_seq_lens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor, seq_lens_ptr: torch.Tensor, num_rejected_ptr: torch.Tensor,
    max_num_reqs: int, max_model_len: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _draft_prefill(
        *numpys(target_input_ids_ptr, target_positions_ptr, last_sampled_ptr.view(-1),
        idx_mapping_ptr, out_input_ids_ptr, out_positions_ptr,
        last_token_indices_ptr[:max_num_reqs], out_query_start_loc_ptr[:max_num_reqs + 1],
        out_seq_lens_ptr[:max_num_reqs], query_start_loc_ptr, seq_lens_ptr, num_rejected_ptr),
        max_model_len,
    )  # fmt: skip


@compiled
def _gather_drafts(
    drafts, draft_positions, input_ids, positions, logits_indices, requests, local_positions,
    prefill_lens,
):  # fmt: skip
    for row in range(drafts.shape[0]):
        at, local = logits_indices[row], local_positions[row]
        draft_positions[row] = positions[at]
        # While a request's first row is a token of the prefill, its draft slots hold placeholders.
        is_placeholder = local > 0 and positions[at] - local < prefill_lens[requests[row]]
        drafts[row] = -1 if is_placeholder else input_ids[at]


@implements("spec_decode.rejection_sampler._gather_draft_sampled_kernel")
def gather_draft_sampled(
    draft_sampled_ptr: torch.Tensor, pos_ptr: torch.Tensor, input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor, logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor, expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor, num_logits: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _gather_drafts(
        *numpys(
            draft_sampled_ptr, pos_ptr, input_ids_ptr, positions_ptr, logits_indices_ptr,
            expanded_idx_mapping_ptr, expanded_local_pos_ptr, prefill_len_ptr,
        ),
    )  # fmt: skip


@compiled
def _flatten(flat, sampled, num_sampled, cu_num_logits):
    for i in range(num_sampled.shape[0]):
        for j in range(num_sampled[i]):
            flat[cu_num_logits[i] + j] = sampled[i, j]


@implements("spec_decode.rejection_sampler._flatten_sampled_kernel")
def flatten_sampled(
    flat_sampled_ptr: torch.Tensor, sampled_ptr: torch.Tensor, sampled_stride: int,
    num_sampled_ptr: torch.Tensor, cu_num_logits_ptr: torch.Tensor,
) -> None:  # fmt: skip
    _flatten(*numpys(flat_sampled_ptr, sampled_ptr, num_sampled_ptr, cu_num_logits_ptr))
