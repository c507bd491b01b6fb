"""Kernels for temperature, Gumbel-max sampling and min-p."""

from __future__ import annotations

import torch

from dyntree_kernels.cpu import gumbel
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
