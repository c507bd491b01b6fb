"""LoRA adapters on the CPU: one product for the rows of each adapter."""

from __future__ import annotations

import functools
from typing import Any

import torch


def mend_adapters() -> None:
    """Replace the operations of vLLM's CPU adapters.

    Those of vLLM 0.32 copy an adapter's weights for every row. For the 544 rows of 32 trees of 16
    nodes, a vocabulary of 151,936 and rank 16 in bf16, the copies take 2.6 GB in every step. They
    also give a row without an adapter, -1, the weights of the last one
    (vllm-project/vllm#49656). A second call has no effect.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    module: Any = lora_ops
    wrapper: Any = punica_cpu
    if hasattr(module.bgmv_expand, "__wrapped__"):
        return
    for own in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
        mended = functools.wraps(getattr(module, own.__name__))(own)
        # The segmented operations of `lora_ops` call these by their names there.
        for each in (module, wrapper):
            setattr(each, own.__name__, mended)


def bgmv_shrink(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    outputs: torch.Tensor,
    adapters: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Write the product of each row and its adapter's weights.

    Args:
        inputs: [M, I].
        outputs: [M, O], or more columns, which stay as they are.
        weights: [adapters, 1, O, I] or [adapters, O, I].
        adapters: int [M], -1 for a row without an adapter, which becomes 0.
        scaling: a factor on the result.
    """
    _write(inputs, weights, outputs[:, : weights.shape[-2]], adapters, add=False, scaling=scaling)


def bgmv_expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    outputs: torch.Tensor,
    adapters: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Do as `bgmv_shrink`; add to what ``outputs`` hold if ``add_inputs``.

    Where ``outputs`` have fewer columns than the weights have, the others are left out.
    """
    _write(inputs, weights, outputs[:, : weights.shape[-2]], adapters, add=add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    outputs: torch.Tensor,
    adapters: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Do as `bgmv_expand`, with ``slice_size`` columns of ``outputs`` from ``slice_offset`` on."""
    columns = outputs[:, slice_offset : slice_offset + slice_size]
    _write(inputs, weights, columns, adapters, add=add_inputs)


def _write(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    outputs: torch.Tensor,
    adapters: torch.Tensor,
    *,
    add: bool,
    scaling: float = 1.0,
) -> None:
    if not add:
        outputs.zero_()
    for adapter, stacked in enumerate(weights):
        rows = (adapters == adapter).nonzero().flatten()
        if len(rows):
            weight = stacked.view(weights.shape[-2:])[: outputs.shape[1]].to(outputs.dtype)
            product = inputs[rows].to(outputs.dtype) @ weight.T
            outputs.index_add_(0, rows, product, alpha=scaling)
