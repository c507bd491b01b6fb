"""Kernels for what requests ask of their tokens: allowed tokens, logit bias, minimum length, bad
words, grammars, penalties, and thinking budgets, within which a request must end its reasoning."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import (
    FORCED_LOGIT,
    forced_token,
    is_suffix,
    last_match,
    penalize_row,
)
from vllm_cpu_runner.arrays import numpys
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import numpy.typing as npt

_INF = np.float32(np.inf)


@compiled
def _mask_stop_tokens(logits, stop_ids, restore):
    saved = logits[stop_ids]
    logits[stop_ids] = -_INF
    if restore and not np.any(logits > -_INF):
        # If a grammar allows only the stop tokens, they take precedence over the minimum length.
        for i in range(stop_ids.shape[0]):
            if -_INF < saved[i] < _INF:
                logits[stop_ids[i]] = saved[i]


@implements("sample.logit_bias._bias_kernel", "vocab_size LOGITS_BLOCK_SIZE")
@compiled
def bias(
    logits, expanded_idx_mapping, num_allowed_token_ids, allowed_token_ids, num_logit_bias,
    bias_token_ids, bias, pos, min_lens, num_stop_token_ids, restore_when_all_masked,
    stop_token_ids, CHECK_ALL_MASKED_ROWS,
):  # fmt: skip
    for row in range(logits.shape[0]):
        request, values = expanded_idx_mapping[row], logits[row]
        if num_allowed_token_ids[request] > 0:
            ids = allowed_token_ids[request, : num_allowed_token_ids[request]]
            saved = values[ids]
            values[:] = -_INF
            values[ids] = saved
        for i in range(num_logit_bias[request]):
            values[bias_token_ids[request, i]] += bias[request, i]
        if num_stop_token_ids[request] > 0 and pos[row] + 1 < min_lens[request]:
            ids = stop_token_ids[request, : num_stop_token_ids[request]]
            restore = CHECK_ALL_MASKED_ROWS and restore_when_all_masked[request] != 0
            _mask_stop_tokens(values, ids, restore)


@implements("sample.bad_words._bad_words_kernel")
@compiled
def bad_words(
    logits, expanded_idx_mapping, bad_word_token_ids, bad_word_offsets, num_bad_words,
    all_token_ids, prompt_len, total_len, input_ids, expanded_local_pos,
):  # fmt: skip
    for row in range(logits.shape[0]):
        request, local = expanded_idx_mapping[row], expanded_local_pos[row]
        committed = all_token_ids[request, prompt_len[request] : total_len[request]]
        # A request's first row is that of its last committed token; rows of its drafts follow.
        drafts = input_ids[row - local + 1 : row + 1]
        for word in range(num_bad_words[request]):
            last = bad_word_offsets[request, word + 1] - 1
            token = bad_word_token_ids[request, last]
            prefix = bad_word_token_ids[request, bad_word_offsets[request, word] : last]
            # A tokenizer may know tokens that the model lacks; vLLM's kernel writes beyond the row.
            if token < logits.shape[1] and is_suffix(prefix, committed, drafts):
                logits[row, token] = -_INF


@compiled
def _mask_grammar(logits, mapping, cu_num_logits, bitmask, mask_stride, masked):
    for i in range(mapping.shape[0]):
        request, local = mapping[i] // mask_stride, mapping[i] % mask_stride
        row = cu_num_logits[request] + local
        if row >= cu_num_logits[request + 1]:
            continue
        for token in range(logits.shape[1]):
            word = token >> 5
            if word >= bitmask.shape[1] or (bitmask[i, word] >> (token & 31)) & 1 == 0:
                logits[row, token] = masked


_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def _bit_rows(logits: torch.Tensor) -> tuple[npt.NDArray[np.signedinteger], np.signedinteger]:
    """Return the bits of the logits and of -inf as integers, because NumPy has no bfloat16."""
    bits = _BITS[logits.dtype]
    infinity = torch.tensor([float("-inf")], dtype=logits.dtype).view(bits).numpy()
    return logits.view(bits).numpy(), infinity[0]


@implements("structured_outputs._apply_grammar_bitmask_kernel", "vocab_size")
def apply_grammar_bitmask(
    logits: torch.Tensor, logits_indices: torch.Tensor, cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor, MASK_STRIDE: int,
) -> None:  # fmt: skip
    rows, masked = _bit_rows(logits)
    _mask_grammar(rows, *numpys(logits_indices, cu_num_logits, bitmask), MASK_STRIDE, masked)


@implements("sample.penalties._penalties_kernel", "vocab_size")
@compiled
def penalties(
    logits, expanded_idx_mapping, token_ids, expanded_local_pos, repetition_penalty,
    frequency_penalty, presence_penalty, prompt_bin_mask, output_bin_counts,
):  # fmt: skip
    one, zero = np.float32(1), np.float32(0)
    for row in range(logits.shape[0]):
        request = expanded_idx_mapping[row]
        rep, freq = repetition_penalty[request], frequency_penalty[request]
        pres = presence_penalty[request]
        if rep == one and freq == zero and pres == zero:
            continue
        # The request's drafts up to this row count as output. Its root is token_ids[row - local].
        drafts = token_ids[row - expanded_local_pos[row] + 1 : row + 1]
        counts, seen = output_bin_counts[request], prompt_bin_mask[request]
        penalize_row(logits[row], counts, drafts, seen, rep, freq, pres)


@implements("sample.penalties._bincount_kernel")
@compiled
def bincount(
    expanded_idx_mapping, all_token_ids, prompt_len, prefill_len, prompt_bin_mask,
    output_bin_counts,
):  # fmt: skip
    seen = prompt_bin_mask.view(np.uint32)
    for request in expanded_idx_mapping:
        for i in range(prompt_len[request]):
            token = all_token_ids[request, i]
            seen[request, token >> 5] |= np.uint32(1) << np.uint32(token & 31)
        for i in range(prompt_len[request], prefill_len[request]):
            output_bin_counts[request, all_token_ids[request, i]] += 1


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
