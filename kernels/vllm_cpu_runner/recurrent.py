"""Kernels for models with recurrent layers."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.kv_move import pointer
from vllm_cpu_runner.arrays import numpys
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


@compiled
def _zero(addresses, strides, sizes, blocks):
    for segment in range(addresses.shape[0]):
        for block in blocks:
            first = np.int64(addresses[segment]) + 4 * block * strides[segment]
            numba.carray(pointer(first), sizes[segment], np.int32)[:] = 0


@implements("vllm.v1.worker.utils._zero_kv_blocks_kernel")
def zero_kv_blocks(
    seg_addrs_ptr: torch.Tensor, seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor, block_ids_ptr: torch.Tensor, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    """Clear blocks of the KV cache, which may hold states of another request."""
    _zero(*numpys(seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr))
