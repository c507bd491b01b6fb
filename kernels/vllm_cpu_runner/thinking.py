"""Kernels for thinking budgets: a request must end its reasoning within so many tokens."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import FORCED_LOGIT, forced_token, last_match
from vllm_cpu_runner.registry import implements


@implements(
    "sample.thinking_budget._update_committed_marker_cache_kernel",
    "START_LEN NATURAL_END_LEN MAX_LEN",
)
@compiled
def update_committed_marker_cache(
    req_ids, thinking_token_budget, all_token_ids, total_len, cached_last_start, cached_last_end,
    cached_scan_pos, reasoning_start_token_ids, natural_reasoning_end_token_ids, BLOCK,
):  # fmt: skip
    begin, finish = reasoning_start_token_ids, natural_reasoning_end_token_ids
    for request in req_ids:
        if thinking_token_budget[request] < 0:
            continue
        total, scan = total_len[request], cached_scan_pos[request]
        tokens = all_token_ids[request, :total]
        start, end = cached_last_start[request], cached_last_end[request]
        if scan > total:
            scan, start, end = 0, -1, -1
        if scan == 0 and start < 0 and end < 0:
            # Only the order of the two markers matters, so stop at the last block that has either.
            high = total
            while high > 0 and start < 0 and end < 0:
                low = max(0, high - BLOCK)
                start = last_match(tokens, begin, low, high)
                end = last_match(tokens, finish, low, high)
                high = low
        else:
            start = max(start, last_match(tokens, begin, scan, total))
            end = max(end, last_match(tokens, finish, scan, total))
        cached_last_start[request], cached_last_end[request] = start, end
        longest = max(begin.shape[0], finish.shape[0])
        cached_scan_pos[request] = max(0, total - (longest - 1))


@implements("sample.thinking_budget._thinking_budget_kernel", "START_LEN NATURAL_END_LEN END_LEN")
@compiled
def thinking_budget(
    logits, expanded_idx_mapping, thinking_token_budget, all_token_ids, total_len, input_ids,
    expanded_local_pos, cached_last_start, cached_last_end, reasoning_start_token_ids,
    natural_reasoning_end_token_ids, reasoning_end_token_ids,
):  # fmt: skip
    for row in range(logits.shape[0]):
        request, local = expanded_idx_mapping[row], expanded_local_pos[row]
        if thinking_token_budget[request] < 0:
            continue
        total = total_len[request]
        # A request's first row is that of its last committed token; rows of its drafts follow.
        drafts = input_ids[row - local + 1 : row + 1]
        tokens = np.concatenate((all_token_ids[request, :total], drafts))
        token = forced_token(
            tokens, total, thinking_token_budget[request], cached_last_start[request],
            cached_last_end[request], reasoning_start_token_ids, natural_reasoning_end_token_ids,
            reasoning_end_token_ids,
        )  # fmt: skip
        # A tokenizer may know tokens that the model lacks; vLLM's kernel writes beyond the row.
        if 0 <= token < logits.shape[1]:
            logits[row, token] = FORCED_LOGIT
