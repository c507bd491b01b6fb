"""Kernels for temperature, Gumbel-max sampling and min-p."""

from __future__ import annotations

import torch

from dyntree_kernels.cpu import gumbel
from vllm_cpu_runner.registry import implements

# vLLM adds this to the position when it samples from the draft, so that the sample is independent
# of the target's (_DRAFT_NOISE_SALT of vLLM's gumbel.py).
_DRAFT_POSITION_OFFSET = 1 << 30


@implements("sample.gumbel._temperature_kernel")
def temperature(
    logits_ptr: torch.Tensor, logits_stride: int, expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor, vocab_size: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    scale = temperature_ptr[expanded_idx_mapping_ptr]
    scale.masked_fill_(scale == 0, 1)
    if not bool((scale == 1).all()):
        logits_ptr.div_(scale.unsqueeze(1))


@implements("sample.gumbel._gumbel_sample_kernel")
def gumbel_sample(
    local_argmax_ptr: torch.Tensor, local_argmax_stride: int, local_max_ptr: torch.Tensor,
    local_max_stride: int, logits_cache_ptr: torch.Tensor | None, logits_cache_stride_0: int,
    logits_cache_stride_1: int, logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None, logits_cache_source_stride: int,
    logits_ptr: torch.Tensor, logits_stride: int, expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor, pos_ptr: torch.Tensor, temp_ptr: torch.Tensor, vocab_size: int,
    BLOCK_SIZE: int, IS_DRAFTING: bool, APPLY_TEMPERATURE: bool, USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:  # fmt: skip
    """Sample a token of each row by the Gumbel-max trick, per block of the vocabulary.

    A row whose request is -1 is a placeholder without a temperature, seed or cache entry.

    Raises:
        ValueError: if there is a cache of logits without a column or source.
    """
    if logits_cache_ptr is not None:
        if logits_cache_col_ptr is None or logits_cache_source_ptr is None:
            raise ValueError("a cache of logits needs a column and a source")
        valid = expanded_idx_mapping_ptr >= 0
        columns = logits_cache_col_ptr.expand_as(valid)[valid].long()
        cache_rows = (expanded_idx_mapping_ptr[valid], columns)
        logits_cache_ptr[..., :vocab_size].index_put_(cache_rows, logits_cache_source_ptr[valid])
    gumbel.sample_blocks(
        local_argmax_ptr, local_max_ptr, logits_ptr.to(torch.float32), expanded_idx_mapping_ptr,
        temp_ptr, seeds_ptr, pos_ptr + _DRAFT_POSITION_OFFSET if IS_DRAFTING else pos_ptr,
        block=BLOCK_SIZE, divide=APPLY_TEMPERATURE,
    )  # fmt: skip


@implements("sample.min_p._min_p_kernel")
def min_p(
    logits_ptr: torch.Tensor, logits_stride: int, expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor, vocab_size: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    # log(0) = -inf masks nothing, so rows without min-p need no special case.
    log_min_p = min_p_ptr[expanded_idx_mapping_ptr].to(torch.float32).log_().unsqueeze(1)
    threshold = logits_ptr.amax(1, keepdim=True).to(torch.float32) + log_min_p
    logits_ptr.masked_fill_(logits_ptr < threshold, float("-inf"))
