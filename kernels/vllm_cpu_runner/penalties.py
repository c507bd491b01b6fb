"""Kernels for repetition, frequency and presence penalties."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import penalize_row
from vllm_cpu_runner.arrays import float32_rows, numpys
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import torch


@compiled
def _penalize(
    logits, requests, token_ids, local_positions, repetition, frequency, presence, prompt_mask,
    output_counts,
):  # fmt: skip
    one, zero = np.float32(1), np.float32(0)
    for row in range(logits.shape[0]):
        request = requests[row]
        rep, freq, pres = repetition[request], frequency[request], presence[request]
        if rep == one and freq == zero and pres == zero:
            continue
        # The request's drafts up to this row count as output. Its root is token_ids[row - local].
        drafts = token_ids[row - local_positions[row] + 1 : row + 1]
        counts, seen = output_counts[request], prompt_mask[request]
        penalize_row(logits[row], counts, drafts, seen, rep, freq, pres)


@implements("sample.penalties._penalties_kernel")
def penalties(
    logits_ptr: torch.Tensor, logits_stride: int, expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor, expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor, frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor, prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int, output_bin_counts_ptr: torch.Tensor, output_bin_counts_stride: int,
    vocab_size: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _penalize(
        float32_rows('penalties', logits_ptr),
        *numpys(
            expanded_idx_mapping_ptr, token_ids_ptr, expanded_local_pos_ptr, repetition_penalty_ptr,
            frequency_penalty_ptr, presence_penalty_ptr, prompt_bin_mask_ptr, output_bin_counts_ptr,
        ),
    )  # fmt: skip


@compiled
def _count_tokens(requests, token_ids, prompt_lens, prefill_lens, prompt_mask, output_counts):
    for request in requests:
        for i in range(prompt_lens[request]):
            token = token_ids[request, i]
            prompt_mask[request, token >> 5] |= np.uint32(1) << np.uint32(token & 31)
        for i in range(prompt_lens[request], prefill_lens[request]):
            output_counts[request, token_ids[request, i]] += 1


@implements("sample.penalties._bincount_kernel")
def bincount(
    expanded_idx_mapping_ptr: torch.Tensor, all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int, prompt_len_ptr: torch.Tensor, prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor, prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor, output_bin_counts_stride: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _count_tokens(
        *numpys(expanded_idx_mapping_ptr, all_token_ids_ptr, prompt_len_ptr, prefill_len_ptr),
        prompt_bin_mask_ptr.numpy().view(np.uint32), output_bin_counts_ptr.numpy(),
    )  # fmt: skip
