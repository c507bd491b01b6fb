"""Kernels for the log-probabilities, ranks and NaN counts of rows of logits."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import torch

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys
from vllm_cpu_runner.registry import implements


@implements("sample.logprob._topk_log_softmax_kernel")
def topk_log_softmax(
    output_ptr: torch.Tensor, logits_ptr: torch.Tensor, logits_stride: int,
    topk_ids_ptr: torch.Tensor, topk_ids_stride: int, topk: int, vocab_size: int, BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:  # fmt: skip
    logits = logits_ptr.to(torch.float32)
    row_max = logits.amax(1, keepdim=True)
    log_sum = (logits - row_max).exp_().sum(1, keepdim=True).log_()
    torch.sub(logits.gather(1, topk_ids_ptr) - row_max, log_sum, out=output_ptr)


@implements("sample.logprob._ranks_kernel")
def ranks(
    output_ptr: torch.Tensor, logits_ptr: torch.Tensor, logits_stride: int,
    token_ids_ptr: torch.Tensor, vocab_size: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    selected = logits_ptr.gather(1, token_ids_ptr.to(torch.int64).unsqueeze(1))
    torch.sum(logits_ptr >= selected, 1, out=output_ptr)


@compiled
def _fill_ids(out, valid, sampled, topk, requests, num_custom, custom, num_topk):
    for row in range(out.shape[0]):
        out[row, 0] = sampled[row]
        valid[row, 0] = True
        request = requests[row]
        count = num_custom[request]
        if count > 0:
            for i in range(count):
                out[row, 1 + i] = custom[request, i]
                valid[row, 1 + i] = True
        else:
            for i in range(num_topk):
                out[row, 1 + i] = topk[row, i]
                valid[row, 1 + i] = True


@implements("sample.logprob._fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor, out_token_ids_stride: int, out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int, sampled_token_ids_ptr: torch.Tensor, topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int, expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor, per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int, NUM_TOPK: int, PADDED_COLS: int,
) -> None:  # fmt: skip
    _fill_ids(
        *numpys(
            out_token_ids_ptr, out_valid_mask_ptr, sampled_token_ids_ptr, topk_indices_ptr,
            expanded_idx_mapping_ptr, num_per_req_token_ids_ptr, per_req_token_ids_ptr,
        ),
        NUM_TOPK,
    )  # fmt: skip


@compiled
def _next_prompt_ids(out, query_start_loc, requests, computed, token_ids):
    for i in range(requests.shape[0]):
        request = requests[i]
        first = query_start_loc[i]
        for j in range(query_start_loc[i + 1] - first):
            out[first + j] = token_ids[request, computed[request] + 1 + j]


@implements("sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor, all_token_ids_stride: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _next_prompt_ids(
        *numpys(
            prompt_logprobs_token_ids_ptr, query_start_loc_ptr, idx_mapping_ptr,
            num_computed_tokens_ptr, all_token_ids_ptr,
        ),
    )  # fmt: skip


@implements("metrics.logits._num_nans_kernel")
def num_nans(
    logits_ptr: torch.Tensor, logits_stride: int, num_nans_ptr: torch.Tensor, vocab_size: int,
    BLOCK_SIZE: int,
) -> None:  # fmt: skip
    num_nans_ptr.copy_(logits_ptr.isnan().sum(1))
