"""Kernels for repetition, frequency and presence penalties."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import penalize_row
from vllm_cpu_runner.registry import implements


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
