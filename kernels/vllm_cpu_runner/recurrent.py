"""Kernels for models with recurrent layers."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.kv_move import pointer
from vllm_cpu_runner.arrays import int32_pointer
from vllm_cpu_runner.registry import implements

STATES = "vllm.v1.worker.mamba_utils."
_UNUSED = "CONV_STATE_DIM_FIRST HAS_IDX_MAPPING TEMPORAL_TILES COPY_BLOCK_SIZE"


@implements("model_states.mamba_hybrid._scatter_num_accepted_kernel")
def scatter_num_accepted(
    idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    real = idx_mapping >= 0
    counts = num_sampled[: len(real)][real].clamp(min=1)
    num_accepted[idx_mapping[real]] = counts.to(num_accepted.dtype)


@implements("model_states.mamba_hybrid._fill_num_accepted_kernel")
def fill_num_accepted(
    idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_sampled: int
) -> None:
    num_accepted[idx_mapping[idx_mapping >= 0]] = num_sampled


@compiled
def _bytes(address, size):
    return numba.carray(pointer(np.int64(address)), size, np.int8)


@compiled
def _copy_states(
    row, source, target, skipped, tables, stride, bases, steps, sizes, inner, widths, groups, dims
):
    """Copy a request's states between blocks, ``skipped`` tokens on: within the window of a
    convolution, and else to the state of a later block.

    ``dims``: the channels of a convolution whose window has them first; 0 for other states."""
    for state in range(bases.shape[0]):
        address = tables[groups[state]] + 4 * row * stride
        table = numba.carray(int32_pointer(address), max(source + skipped, target) + 1)
        window = widths[state] > 0
        if window and skipped and dims[state]:
            raise NotImplementedError(
                "VLLM_SSM_CONV_STATE_LAYOUT=DS with vLLM's own drafts and a prefix cache is not "
                "supported by the CPU model runner; unset it"
            )
        token = inner[state] * sizes[state] * max(dims[state], 1)
        first = bases[state] + table[source if window else source + skipped] * steps[state]
        first += skipped * token if window else 0
        size = max(widths[state] - skipped, 0) * token if window else token
        into = _bytes(bases[state] + table[target] * steps[state], size)
        into[:] = _bytes(first, size).copy()


@implements(STATES + "preprocess_mamba_align_fused_kernel")
def next_blocks_of_states(
    idx_mapping: torch.Tensor, state_idx: torch.Tensor, num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor, num_accepted_tokens: torch.Tensor, src_col: torch.Tensor,
    src_off: torch.Tensor, num_reqs: int, MAMBA_BLOCK_SIZE: int,
) -> None:  # fmt: skip
    requests = idx_mapping[:num_reqs]
    before, accepted = state_idx[requests], num_accepted_tokens[requests]
    src_col[requests], src_off[requests] = before, (accepted - 1).clamp(min=0)
    rows = torch.diff(query_start_loc[: num_reqs + 1])
    after = (num_computed_tokens[requests] + rows - 1) // MAMBA_BLOCK_SIZE
    state_idx[requests] = after.int()
    moved = (before >= 0) & (before != after)
    num_accepted_tokens[requests] = torch.where(moved, 1, accepted)


@implements(STATES + "precopy_mamba_align_fused_kernel", _UNUSED)
@compiled
def copy_states_forward(
    mamba_state_idx, src_col, token_bias, block_table_ptrs, block_table_stride_req,
    state_base_addrs, state_block_strides, state_elem_sizes, state_inner_sizes, state_conv_widths,
    state_group_indices, state_dim_row_count, idx_mapping, num_reqs,
):  # fmt: skip
    """Copy states to the blocks of their requests' last rows, before a forward."""
    for request in idx_mapping[:num_reqs]:
        source, target = src_col[request], mamba_state_idx[request]
        if request >= 0 and source >= 0 and source != target:
            _copy_states(
                request, source, target, token_bias[request], block_table_ptrs,
                block_table_stride_req, state_base_addrs, state_block_strides, state_elem_sizes,
                state_inner_sizes, state_conv_widths, state_group_indices, state_dim_row_count,
            )  # fmt: skip


@implements(
    STATES + "postprocess_mamba_fused_kernel",
    f"num_scheduled_tokens num_draft_tokens PRECOMPUTED_NEW_COMPUTED {_UNUSED}",
)
@compiled
def copy_states_to_ends(
    num_accepted_tokens, mamba_state_idx, num_computed_tokens, block_table_ptrs,
    block_table_stride_req, state_base_addrs, state_block_strides, state_elem_sizes,
    state_inner_sizes, state_conv_widths, state_group_indices, state_dim_row_count,
    num_accepted_tokens_out, idx_mapping, num_reqs, block_size,
):  # fmt: skip
    """Copy states to the blocks that end at them, after tokens were accepted."""
    for request in idx_mapping[:num_reqs]:
        if request < 0:
            continue
        source, computed = mamba_state_idx[request], num_computed_tokens[request]
        running = computed - num_accepted_tokens[request] + 1
        aligned = computed // block_size * block_size
        if aligned < running:
            continue
        target, skipped = aligned // block_size - 1, aligned - running
        if source == target:
            num_accepted_tokens_out[request] = 1
        if source != target or skipped:
            _copy_states(
                request, source, target, skipped, block_table_ptrs, block_table_stride_req,
                state_base_addrs, state_block_strides, state_elem_sizes, state_inner_sizes,
                state_conv_widths, state_group_indices, state_dim_row_count,
            )  # fmt: skip


@implements("vllm.v1.worker.utils._zero_kv_blocks_kernel")
@compiled
def zero_kv_blocks(seg_addrs, seg_block_strides, seg_page_sizes, block_ids):
    """Clear blocks of the KV cache, which may hold states of another request."""
    for segment in range(seg_addrs.shape[0]):
        for block in block_ids:
            first = np.int64(seg_addrs[segment]) + 4 * block * seg_block_strides[segment]
            numba.carray(pointer(first), seg_page_sizes[segment], np.int32)[:] = 0
