"""Kernels for staged writes, block tables and slot mappings.

Each KV cache group has a block table of its own. A kernel gets them as an array of addresses, with
one row stride per group.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import carray

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import int32_pointer, numpys
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import torch


@compiled
def _write_rows(output, stride, indices, starts, contents, cu_lens):
    begin = 0
    for i in range(indices.shape[0]):
        length = cu_lens[i] - begin
        at = indices[i] * stride + starts[i]
        output[at : at + length] = contents[begin : begin + length]
        begin = cu_lens[i]


@compiled
def _write_group_rows(addresses, strides, indices, starts, contents, cu_lens, group_ids):
    begin = 0
    for i in range(indices.shape[0]):
        length = cu_lens[i] - begin
        at = indices[i] * strides[group_ids[i]] + starts[i]
        table = carray(int32_pointer(addresses[group_ids[i]]), at + length)
        table[at : at + length] = contents[begin : begin + length]
        begin = cu_lens[i]


@implements("buffer_utils._apply_write_kernel")
def apply_write(
    output_ptr: torch.Tensor, output_stride: torch.Tensor | int, write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor, write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor, write_group_ids_ptr: torch.Tensor | None, BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:  # fmt: skip
    writes = (
        write_indices_ptr.numpy(),
        write_starts_ptr.numpy(),
        write_contents_ptr.numpy(),
        write_cu_lens_ptr.numpy(),
    )
    if write_group_ids_ptr is None or isinstance(output_stride, int):
        _write_rows(output_ptr.view(-1).numpy(), output_stride, *writes)
    else:
        strides = output_stride.numpy()
        _write_group_rows(output_ptr.numpy(), strides, *writes, write_group_ids_ptr.numpy())


@compiled
def _gather(requests, sources, targets, strides, num_blocks):
    for group in range(strides.shape[0]):
        stride = strides[group]
        for row in range(requests.shape[0]):
            request = requests[row]
            length = num_blocks[group, request]
            source = carray(int32_pointer(sources[group]), (request + 1) * stride)
            target = carray(int32_pointer(targets[group]), (row + 1) * stride)
            for i in range(length):
                target[row * stride + i] = source[request * stride + i]


@implements("block_table._gather_block_tables_kernel")
def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor, src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor, block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor, num_blocks_stride: int, num_reqs: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    """Copy the block tables of the batch's requests to the batch's rows.

    vLLM's kernel also zeroes the rows that pad a CUDA graph; a batch on the CPU has none.
    """
    _gather(
        *numpys(
            batch_idx_to_req_idx, src_block_table_ptrs, dst_block_table_ptrs, block_table_strides,
            num_blocks_ptr,
        ),
    )  # fmt: skip


@compiled
def _slots(
    requests, query_start_loc, positions, addresses, strides, block_sizes, enabled, slots, pad
):
    num_requests = requests.shape[0]
    for group in range(strides.shape[0]):
        stride, size = strides[group], block_sizes[group]
        row = slots[group]
        row[query_start_loc[num_requests] :] = pad
        for i in range(num_requests):
            request, first, last = requests[i], query_start_loc[i], query_start_loc[i + 1]
            if request < 0 or not enabled[group]:
                row[first:last] = pad
                continue
            table = carray(int32_pointer(addresses[group]), (request + 1) * stride)
            for token in range(first, last):
                place = positions[token] // size
                # vLLM's kernel reads on behind a request's row.
                if place < stride:
                    block = table[request * stride + place]
                    row[token] = block * size + positions[token] % size
                else:
                    row[token] = pad


@implements("block_table._compute_slot_mappings_kernel")
def compute_slot_mappings(
    max_num_tokens: int, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor,
    pos: torch.Tensor, block_table_ptrs: torch.Tensor, block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor, slot_mapping_enabled: torch.Tensor, dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor, slot_mappings_stride: int, cp_rank: int, CP_SIZE: int,
    CP_INTERLEAVE: int, PAD_ID: int, TRITON_BLOCK_SIZE: int,
) -> None:  # fmt: skip
    if CP_SIZE != 1:
        raise NotImplementedError(
            f"context parallelism of size {CP_SIZE} is not supported by the CPU model runner"
        )
    _slots(
        *numpys(
            idx_mapping, query_start_loc, pos, block_table_ptrs, block_table_strides, block_sizes,
            slot_mapping_enabled, slot_mappings_ptr,
        ),
        PAD_ID,
    )  # fmt: skip
