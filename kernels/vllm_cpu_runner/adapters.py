"""LoRA adapters on the CPU: rows without an adapter keep the base model's values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def leave_base_rows_alone() -> None:
    """Replace the operations of vLLM's CPU adapters that add to a layer's output.

    They index the adapters' weights by the adapter of every row, and -1, which stands for none,
    finds the last adapter's (vLLM 0.32; vllm-project/vllm#49656 reports it). So a request without
    an adapter got one beside requests with adapters. A second call has no effect.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    module: Any = lora_ops
    wrapper: Any = punica_cpu
    if hasattr(module.bgmv_expand, "__wrapped__"):
        return
    # The segmented operations of `lora_ops` call these by their names there.
    for each in (module, wrapper):
        each.bgmv_expand = _without_base_rows(each.bgmv_expand)
        each.bgmv_expand_slice = _without_base_rows(each.bgmv_expand_slice)


def _without_base_rows(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def expand(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        outputs: torch.Tensor,
        adapters: torch.Tensor,
        *others: Any,
        **named: Any,
    ) -> None:
        kept = inputs.masked_fill((adapters < 0)[:, None], 0)
        stock(kept, weights, outputs, adapters, *others, **named)

    return expand
