"""Kernels for thinking budgets: a request must end its reasoning within so many tokens."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import FORCED_LOGIT, forced_token, last_match
from vllm_cpu_runner.arrays import float32_rows, numpys
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import torch


@compiled
def _update_markers(
    requests, budgets, token_ids, total_lens, last_starts, last_ends, scan_positions, start_marker,
    end_marker, block,
):  # fmt: skip
    for request in requests:
        if budgets[request] < 0:
            continue
        total, scan = total_lens[request], scan_positions[request]
        tokens = token_ids[request, :total]
        start, end = last_starts[request], last_ends[request]
        if scan > total:
            scan, start, end = 0, -1, -1
        if scan == 0 and start < 0 and end < 0:
            # Only the order of the two markers matters, so stop at the last block that has either.
            high = total
            while high > 0 and start < 0 and end < 0:
                low = max(0, high - block)
                start = last_match(tokens, start_marker, low, high)
                end = last_match(tokens, end_marker, low, high)
                high = low
        else:
            start = max(start, last_match(tokens, start_marker, scan, total))
            end = max(end, last_match(tokens, end_marker, scan, total))
        last_starts[request], last_ends[request] = start, end
        longest = max(start_marker.shape[0], end_marker.shape[0])
        scan_positions[request] = max(0, total - (longest - 1))


@implements("sample.thinking_budget._update_committed_marker_cache_kernel")
def update_committed_marker_cache(
    req_ids_ptr: torch.Tensor, thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor, all_token_ids_stride: int, total_len_ptr: torch.Tensor,
    cached_last_start_ptr: torch.Tensor, cached_last_end_ptr: torch.Tensor,
    cached_scan_pos_ptr: torch.Tensor, reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor, START_LEN: int, NATURAL_END_LEN: int,
    MAX_LEN: int, BLOCK: int,
) -> None:  # fmt: skip
    _update_markers(
        *numpys(
            req_ids_ptr, thinking_token_budget_ptr, all_token_ids_ptr, total_len_ptr,
            cached_last_start_ptr, cached_last_end_ptr, cached_scan_pos_ptr,
            reasoning_start_token_ids_ptr, natural_reasoning_end_token_ids_ptr,
        ),
        BLOCK,
    )  # fmt: skip


@compiled
def _force_end(
    logits, requests, budgets, token_ids, total_lens, input_ids, local_positions, last_starts,
    last_ends, start_marker, end_marker, forced,
):  # fmt: skip
    for row in range(logits.shape[0]):
        request, local = requests[row], local_positions[row]
        if budgets[request] < 0:
            continue
        total = total_lens[request]
        # A request's first row is that of its last committed token; rows of its drafts follow.
        drafts = input_ids[row - local + 1 : row + 1]
        tokens = np.concatenate((token_ids[request, :total], drafts))
        token = forced_token(
            tokens, total, budgets[request], last_starts[request], last_ends[request], start_marker,
            end_marker, forced,
        )  # fmt: skip
        # A tokenizer may know tokens that the model lacks; vLLM's kernel writes beyond the row.
        if 0 <= token < logits.shape[1]:
            logits[row, token] = FORCED_LOGIT


@implements("sample.thinking_budget._thinking_budget_kernel")
def thinking_budget(
    logits_ptr: torch.Tensor, logits_stride: int, expanded_idx_mapping_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor, all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int, total_len_ptr: torch.Tensor, input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor, cached_last_start_ptr: torch.Tensor,
    cached_last_end_ptr: torch.Tensor, reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor, reasoning_end_token_ids_ptr: torch.Tensor,
    START_LEN: int, NATURAL_END_LEN: int, END_LEN: int,
) -> None:  # fmt: skip
    _force_end(
        float32_rows('thinking budget', logits_ptr),
        *numpys(
            expanded_idx_mapping_ptr, thinking_token_budget_ptr, all_token_ids_ptr, total_len_ptr,
            input_ids_ptr, expanded_local_pos_ptr, cached_last_start_ptr, cached_last_end_ptr,
            reasoning_start_token_ids_ptr, natural_reasoning_end_token_ids_ptr,
            reasoning_end_token_ids_ptr,
        ),
    )  # fmt: skip
