"""Kernels for staged writes, block tables and slot mappings.

Each KV cache group has a block table of its own. A kernel gets them as an array of addresses, with
one row stride per group.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from numba import carray

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import int32_pointer, numpys
from vllm_cpu_runner.registry import implements


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


@implements("buffer_utils._apply_write_kernel", "MULTI_GROUP")
def apply_write(
    output, output_stride, write_indices, write_starts, write_contents, write_cu_lens,
    write_group_ids,
):  # fmt: skip
    writes = numpys(write_indices, write_starts, write_contents, write_cu_lens)
    if write_group_ids is None or isinstance(output_stride, int):
        _write_rows(output.view(-1).numpy(), output_stride, *writes)
    else:
        _write_group_rows(*numpys(output, output_stride), *writes, write_group_ids.numpy())


@implements("block_table._gather_block_tables_kernel", "num_reqs")
@compiled
def gather_block_tables(
    batch_idx_to_req_idx, src_block_table_ptrs, dst_block_table_ptrs, block_table_strides,
    num_blocks,
):  # fmt: skip
    """Copy the block tables of the batch's requests to the batch's rows.

    vLLM's kernel also zeroes the rows that pad a CUDA graph; a batch on the CPU has none.
    """
    for group in range(block_table_strides.shape[0]):
        stride = block_table_strides[group]
        for row in range(batch_idx_to_req_idx.shape[0]):
            request = batch_idx_to_req_idx[row]
            length = num_blocks[group, request]
            source = carray(int32_pointer(src_block_table_ptrs[group]), (request + 1) * stride)
            target = carray(int32_pointer(dst_block_table_ptrs[group]), (row + 1) * stride)
            for i in range(length):
                target[row * stride + i] = source[request * stride + i]


@implements(
    "block_table._compute_slot_mappings_kernel",
    "max_num_tokens dcp_sharded cp_rank CP_INTERLEAVE TRITON_BLOCK_SIZE",
)
@compiled
def compute_slot_mappings(
    idx_mapping, query_start_loc, pos, block_table_ptrs, block_table_strides, block_sizes,
    slot_mapping_enabled, slot_mappings, CP_SIZE, PAD_ID,
):  # fmt: skip
    if CP_SIZE != 1:
        raise NotImplementedError(
            "context parallelism is not supported by the CPU model runner; set its size to 1"
        )
    num_requests = idx_mapping.shape[0]
    for group in range(block_table_strides.shape[0]):
        stride, size = block_table_strides[group], block_sizes[group]
        row = slot_mappings[group]
        row[query_start_loc[num_requests] :] = PAD_ID
        for i in range(num_requests):
            request, first, last = idx_mapping[i], query_start_loc[i], query_start_loc[i + 1]
            if request < 0 or not slot_mapping_enabled[group]:
                row[first:last] = PAD_ID
                continue
            table = carray(int32_pointer(block_table_ptrs[group]), (request + 1) * stride)
            for token in range(first, last):
                place = pos[token] // size
                # vLLM's kernel reads on behind a request's row.
                if place < stride:
                    row[token] = table[request * stride + place] * size + pos[token] % size
                else:
                    row[token] = PAD_ID
