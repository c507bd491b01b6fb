"""Kernels for the state of models with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import torch


@implements("model_states.mamba_hybrid._scatter_num_accepted_kernel")
def scatter_num_accepted(
    idx_mapping_ptr: torch.Tensor, num_sampled_ptr: torch.Tensor, num_accepted_ptr: torch.Tensor
) -> None:
    real = idx_mapping_ptr >= 0
    counts = num_sampled_ptr[: len(real)][real].clamp(min=1)
    num_accepted_ptr[idx_mapping_ptr[real]] = counts.to(num_accepted_ptr.dtype)


@implements("model_states.mamba_hybrid._fill_num_accepted_kernel")
def fill_num_accepted(
    idx_mapping_ptr: torch.Tensor, num_accepted_ptr: torch.Tensor, num_sampled: int
) -> None:
    num_accepted_ptr[idx_mapping_ptr[idx_mapping_ptr >= 0]] = num_sampled
