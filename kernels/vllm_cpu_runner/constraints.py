"""Kernels for allowed tokens, logit bias, minimum length, bad words and grammar bitmasks."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import is_suffix
from vllm_cpu_runner.arrays import float32_rows, numpys
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


@compiled
def _apply_bias(
    logits, requests, num_allowed, allowed_ids, num_bias, bias_ids, bias, positions, min_lens,
    num_stop, restore, stop_ids, check_masked,
):  # fmt: skip
    for row in range(logits.shape[0]):
        request, values = requests[row], logits[row]
        if num_allowed[request] > 0:
            ids = allowed_ids[request, : num_allowed[request]]
            saved = values[ids]
            values[:] = -_INF
            values[ids] = saved
        for i in range(num_bias[request]):
            values[bias_ids[request, i]] += bias[request, i]
        if num_stop[request] > 0 and positions[row] + 1 < min_lens[request]:
            ids = stop_ids[request, : num_stop[request]]
            _mask_stop_tokens(values, ids, check_masked and restore[request] != 0)


@implements("sample.logit_bias._bias_kernel")
def bias(
    logits_ptr: torch.Tensor, logits_stride: int, vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor, num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor, allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor, bias_token_ids_ptr: torch.Tensor, bias_token_ids_stride: int,
    bias_ptr: torch.Tensor, bias_stride: int, pos_ptr: torch.Tensor, min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor, restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor, stop_token_ids_stride: int, BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int, CHECK_ALL_MASKED_ROWS: bool,
) -> None:  # fmt: skip
    _apply_bias(
        float32_rows('logit bias', logits_ptr),
        *numpys(
            expanded_idx_mapping_ptr, num_allowed_token_ids_ptr, allowed_token_ids_ptr,
            num_logit_bias_ptr, bias_token_ids_ptr, bias_ptr, pos_ptr, min_lens_ptr,
            num_stop_token_ids_ptr, restore_when_all_masked_ptr, stop_token_ids_ptr,
        ),
        CHECK_ALL_MASKED_ROWS,
    )  # fmt: skip


@compiled
def _mask_bad_words(
    logits, requests, word_tokens, word_offsets, num_words, token_ids, prompt_lens, total_lens,
    input_ids, local_positions,
):  # fmt: skip
    for row in range(logits.shape[0]):
        request, local = requests[row], local_positions[row]
        committed = token_ids[request, prompt_lens[request] : total_lens[request]]
        # A request's first row is that of its last committed token; rows of its drafts follow.
        drafts = input_ids[row - local + 1 : row + 1]
        for word in range(num_words[request]):
            last = word_offsets[request, word + 1] - 1
            token = word_tokens[request, last]
            prefix = word_tokens[request, word_offsets[request, word] : last]
            # A tokenizer may know tokens that the model lacks; vLLM's kernel writes beyond the row.
            if token < logits.shape[1] and is_suffix(prefix, committed, drafts):
                logits[row, token] = -_INF


@implements("sample.bad_words._bad_words_kernel")
def bad_words(
    logits_ptr: torch.Tensor, logits_stride: int, expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor, bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor, bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor, all_token_ids_ptr: torch.Tensor, all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor, total_len_ptr: torch.Tensor, input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:  # fmt: skip
    _mask_bad_words(
        float32_rows('bad words', logits_ptr),
        *numpys(
            expanded_idx_mapping_ptr, bad_word_token_ids_ptr, bad_word_offsets_ptr,
            num_bad_words_ptr, all_token_ids_ptr, prompt_len_ptr, total_len_ptr, input_ids_ptr,
            expanded_local_pos_ptr,
        ),
    )  # fmt: skip


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


@implements("structured_outputs._apply_grammar_bitmask_kernel")
def apply_grammar_bitmask(
    logits_ptr: torch.Tensor, logits_stride: int, logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor, bitmask_ptr: torch.Tensor, bitmask_stride: int,
    vocab_size: int, MASK_STRIDE: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    rows, masked = _bit_rows(logits_ptr)
    _mask_grammar(
        rows, *numpys(logits_indices_ptr, cu_num_logits_ptr, bitmask_ptr), MASK_STRIDE, masked
    )
