"""Kernels for temperature, Gumbel-max sampling and min-p, and for the log-probabilities, ranks and
NaN counts of rows of logits."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import torch

from dyntree_kernels.cpu import gumbel
from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.registry import implements

# vLLM adds this to the position when it samples from the draft, so that the sample is independent
# of the target's (_DRAFT_NOISE_SALT of vLLM's gumbel.py).
_DRAFT_POSITION_OFFSET = 1 << 30


@implements("sample.gumbel._temperature_kernel", "vocab_size")
def temperature(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> None:
    scale = temperature[expanded_idx_mapping]
    scale.masked_fill_(scale == 0, 1)
    if not bool((scale == 1).all()):
        logits.div_(scale.unsqueeze(1))


@implements("sample.gumbel._gumbel_sample_kernel", "USE_FP64 PER_TOKEN_COL")
def gumbel_sample(
    local_argmax: torch.Tensor, local_max: torch.Tensor, logits_cache: torch.Tensor | None,
    logits_cache_col: torch.Tensor | None, logits_cache_source: torch.Tensor | None,
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, seeds: torch.Tensor,
    pos: torch.Tensor, temp: torch.Tensor, vocab_size: int, BLOCK_SIZE: int, IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
) -> None:  # fmt: skip
    """Sample a token of each row by the Gumbel-max trick, per block of the vocabulary.

    A row whose request is -1 is a placeholder without a temperature, seed or cache entry.

    Raises:
        ValueError: if there is a cache of logits without a column or source.
    """
    if logits_cache is not None:
        if logits_cache_col is None or logits_cache_source is None:
            raise ValueError("a cache of logits needs a column and a source")
        valid = expanded_idx_mapping >= 0
        columns = logits_cache_col.expand_as(valid)[valid].long()
        cache_rows = (expanded_idx_mapping[valid], columns)
        logits_cache[..., :vocab_size].index_put_(cache_rows, logits_cache_source[valid])
    gumbel.sample_blocks(
        local_argmax, local_max, logits.to(torch.float32), expanded_idx_mapping,
        temp, seeds, pos + _DRAFT_POSITION_OFFSET if IS_DRAFTING else pos,
        block=BLOCK_SIZE, divide=APPLY_TEMPERATURE,
    )  # fmt: skip


@implements("sample.min_p._min_p_kernel", "vocab_size")
def min_p(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor) -> None:
    # log(0) = -inf masks nothing, so rows without min-p need no special case.
    log_min_p = min_p[expanded_idx_mapping].to(torch.float32).log_().unsqueeze(1)
    threshold = logits.amax(1, keepdim=True).to(torch.float32) + log_min_p
    logits.masked_fill_(logits < threshold, float("-inf"))


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
