"""Kernels for models with recurrent layers."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.kv_move import pointer
from vllm_cpu_runner.arrays import int32_pointer, numpys
from vllm_cpu_runner.registry import implements

STATES = "vllm.v1.worker.mamba_utils."


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
def _bytes(address, size):
    return numba.carray(pointer(np.int64(address)), size, np.int8)


@compiled
def _copy_states(
    row, source, target, skipped, tables, stride, bases, steps, sizes, inner, widths, groups
):
    """Copy a request's states between blocks, ``skipped`` tokens on: within the window of a
    convolution, and else to the state of a later block."""
    for state in range(bases.shape[0]):
        address = tables[groups[state]] + 4 * row * stride
        table = numba.carray(int32_pointer(address), max(source + skipped, target) + 1)
        window = widths[state] > 0
        token = inner[state] * sizes[state]
        first = bases[state] + table[source if window else source + skipped] * steps[state]
        first += skipped * token if window else 0
        size = max(widths[state] - skipped, 0) * token if window else token
        into = _bytes(bases[state] + table[target] * steps[state], size)
        into[:] = _bytes(first, size).copy()


def _layout(
    channels_first: bool, tables: torch.Tensor, stride: int, *of_states: torch.Tensor
) -> tuple[Any, ...]:
    """Return where the states are, as `_copy_states` takes it."""
    if channels_first:
        raise NotImplementedError(
            "VLLM_SSM_CONV_STATE_LAYOUT=DS with a prefix cache is not supported by the CPU model "
            "runner; unset it"
        )
    return tables.numpy(), stride, *numpys(*of_states)


@implements(STATES + "preprocess_mamba_align_fused_kernel")
def next_blocks_of_states(
    idx_mapping_ptr: torch.Tensor, state_idx_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor,
    num_accepted_tokens_ptr: torch.Tensor, src_col_ptr: torch.Tensor, src_off_ptr: torch.Tensor,
    num_reqs: int, BLOCK_SIZE: int, MAMBA_BLOCK_SIZE: int,
) -> None:  # fmt: skip
    requests = idx_mapping_ptr[:num_reqs]
    before, accepted = state_idx_ptr[requests], num_accepted_tokens_ptr[requests]
    src_col_ptr[requests], src_off_ptr[requests] = before, (accepted - 1).clamp(min=0)
    rows = torch.diff(query_start_loc_ptr[: num_reqs + 1])
    after = (num_computed_tokens_ptr[requests] + rows - 1) // MAMBA_BLOCK_SIZE
    state_idx_ptr[requests] = after.int()
    moved = (before >= 0) & (before != after)
    num_accepted_tokens_ptr[requests] = torch.where(moved, 1, accepted)


@compiled
def _copy_forward(requests, targets, sources, skipped, *layout):
    for request in requests:
        source, target = sources[request], targets[request]
        if request >= 0 and source >= 0 and source != target:
            _copy_states(request, source, target, skipped[request], *layout)


@implements(STATES + "precopy_mamba_align_fused_kernel")
def copy_states_forward(
    mamba_state_idx_ptr: torch.Tensor, src_col_ptr: torch.Tensor, token_bias_ptr: torch.Tensor,
    block_table_ptrs_ptr: torch.Tensor, block_table_stride_req: int,
    state_base_addrs_ptr: torch.Tensor, state_block_strides_ptr: torch.Tensor,
    state_elem_sizes_ptr: torch.Tensor, state_inner_sizes_ptr: torch.Tensor,
    state_conv_widths_ptr: torch.Tensor, state_group_indices_ptr: torch.Tensor,
    state_dim_row_count_ptr: torch.Tensor, state_dim_row_stride_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor, num_reqs: int, COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool, HAS_IDX_MAPPING: bool = True, TEMPORAL_TILES: int = 1,
) -> None:  # fmt: skip
    """Copy states to the blocks of their requests' last rows, before a forward."""
    _copy_forward(
        *numpys(idx_mapping_ptr[:num_reqs], mamba_state_idx_ptr, src_col_ptr, token_bias_ptr),
        *_layout(
            CONV_STATE_DIM_FIRST, block_table_ptrs_ptr, block_table_stride_req,
            state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr,
            state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        ),
    )  # fmt: skip


@compiled
def _copy_to_ends(requests, accepted, sources, computed, accepted_out, size, *layout):
    for request in requests:
        if request < 0:
            continue
        source, running = sources[request], computed[request] - accepted[request] + 1
        aligned = computed[request] // size * size
        if aligned < running:
            continue
        target, skipped = aligned // size - 1, aligned - running
        if source == target:
            accepted_out[request] = 1
        if source != target or skipped:
            _copy_states(request, source, target, skipped, *layout)


@implements(STATES + "postprocess_mamba_fused_kernel")
def copy_states_to_ends(
    num_accepted_tokens_ptr: torch.Tensor, mamba_state_idx_ptr: torch.Tensor,
    num_scheduled_tokens_ptr: None, num_computed_tokens_ptr: torch.Tensor,
    num_draft_tokens_ptr: None, block_table_ptrs_ptr: torch.Tensor, block_table_stride_req: int,
    state_base_addrs_ptr: torch.Tensor, state_block_strides_ptr: torch.Tensor,
    state_elem_sizes_ptr: torch.Tensor, state_inner_sizes_ptr: torch.Tensor,
    state_conv_widths_ptr: torch.Tensor, state_group_indices_ptr: torch.Tensor,
    state_dim_row_count_ptr: torch.Tensor, state_dim_row_stride_ptr: torch.Tensor,
    num_accepted_tokens_out_ptr: torch.Tensor, idx_mapping_ptr: torch.Tensor, num_reqs: int,
    block_size: int, COPY_BLOCK_SIZE: int, CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = False, PRECOMPUTED_NEW_COMPUTED: bool = False, TEMPORAL_TILES: int = 1,
) -> None:  # fmt: skip
    """Copy states to the blocks that end at them, after tokens were accepted."""
    _copy_to_ends(
        *numpys(
            idx_mapping_ptr[:num_reqs], num_accepted_tokens_ptr, mamba_state_idx_ptr,
            num_computed_tokens_ptr, num_accepted_tokens_out_ptr,
        ),
        block_size,
        *_layout(
            CONV_STATE_DIM_FIRST, block_table_ptrs_ptr, block_table_stride_req,
            state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr,
            state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        ),
    )  # fmt: skip


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
