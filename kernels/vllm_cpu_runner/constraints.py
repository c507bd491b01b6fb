"""Kernels for allowed tokens, logit bias, minimum length, bad words and grammar bitmasks."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import is_suffix
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
