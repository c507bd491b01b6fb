"""Kernels for the log-probabilities, ranks and NaN counts of rows of logits."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import torch

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.registry import implements


@implements("sample.logprob._topk_log_softmax_kernel", "topk vocab_size TOPK_BLOCK_SIZE")
def topk_log_softmax(output: torch.Tensor, logits: torch.Tensor, topk_ids: torch.Tensor) -> None:
    logits = logits.to(torch.float32)
    row_max = logits.amax(1, keepdim=True)
    log_sum = (logits - row_max).exp_().sum(1, keepdim=True).log_()
    torch.sub(logits.gather(1, topk_ids) - row_max, log_sum, out=output)


@implements("sample.logprob._ranks_kernel", "vocab_size")
def ranks(output: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    selected = logits.gather(1, token_ids.to(torch.int64).unsqueeze(1))
    torch.sum(logits >= selected, 1, out=output)


@implements("sample.logprob._fill_logprob_token_ids_kernel", "PADDED_COLS")
@compiled
def fill_logprob_token_ids(
    out_token_ids, out_valid_mask, sampled_token_ids, topk_indices, expanded_idx_mapping,
    num_per_req_token_ids, per_req_token_ids, NUM_TOPK,
):  # fmt: skip
    for row in range(out_token_ids.shape[0]):
        out_token_ids[row, 0] = sampled_token_ids[row]
        out_valid_mask[row, 0] = True
        request = expanded_idx_mapping[row]
        count = num_per_req_token_ids[request]
        if count > 0:
            for i in range(count):
                out_token_ids[row, 1 + i] = per_req_token_ids[request, i]
                out_valid_mask[row, 1 + i] = True
        else:
            for i in range(NUM_TOPK):
                out_token_ids[row, 1 + i] = topk_indices[row, i]
                out_valid_mask[row, 1 + i] = True


@implements("sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
@compiled
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids, query_start_loc, idx_mapping, num_computed_tokens, all_token_ids
):
    for i in range(idx_mapping.shape[0]):
        request = idx_mapping[i]
        first, done = query_start_loc[i], num_computed_tokens[request]
        for j in range(query_start_loc[i + 1] - first):
            prompt_logprobs_token_ids[first + j] = all_token_ids[request, done + 1 + j]


@implements("metrics.logits._num_nans_kernel", "vocab_size")
def num_nans(logits: torch.Tensor, num_nans: torch.Tensor) -> None:
    num_nans.copy_(logits.isnan().sum(1))
