"""Cases of the kernels that prepare a batch, and of those after sampling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from case_table import (
    COMPUTED,
    CPU,
    CU_LOGITS,
    PREFILL,
    REQUESTS,
    STARTS,
    Results,
    case,
    int32,
    int64,
    random_ids,
)


@case(torch.int32, torch.int64, torch.float32)
def staged_writes(dtype: torch.dtype) -> Results:
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    table = StagedWriteTensor((5, 1500), dtype, CPU)
    for row, start, length in ((4, 7, 1100), (0, 0, 3), (4, 9, 2), (2, 1499, 1)):
        table.stage_write(row, start, torch.randint(99, (length,)).tolist())
    table.apply_write()
    flat = StagedWriteTensor(6, dtype, CPU)
    flat.stage_write_elem(5, 42)
    flat.stage_write_elem(0, 43)
    flat.apply_write()
    return {"table": table.gpu, "flat": flat.gpu}


@case(1, 2)
def block_tables(groups: int) -> Results:
    from vllm.v1.worker.gpu.block_table import BlockTables

    widths, sizes = [9, 1200][:groups], [16, 4][:groups]
    tables = BlockTables(sizes, 4, 40, widths, CPU)
    for request, blocks in ((3, 2), (0, 1), (2, 1)):
        ids = tuple(torch.randint(1, 50, (blocks * 4,)).tolist() for _ in range(groups))
        tables.append_block_ids(request, ids, overwrite=True)
    tables.append_block_ids(3, tuple([60 + g] for g in range(groups)), overwrite=False)
    tables.apply_staged_writes()
    positions = torch.cat([torch.arange(20, 23), torch.arange(4, 11), torch.arange(6, 8)])
    gathered = tables.gather_block_tables(REQUESTS, 3)
    slots = tables.compute_slot_mappings(REQUESTS, STARTS, positions, 40).clone()
    padded = tables.compute_slot_mappings(int64(-1, 2), int32(0, 4, 6), positions, 40).clone()
    none = tables.compute_slot_mappings(int64(), int32(0), positions, 40).clone()
    out = {f"gathered{i}": table for i, table in enumerate(gathered)}
    return out | {"slots": slots, "padded": padded, "none": none}


@case()
def slot_mapping_of_a_disabled_group() -> Results:
    from vllm.v1.worker.gpu.block_table import BlockTables

    tables = BlockTables([4, 4], 1, 10, [3, 3], CPU, slot_mapping_enabled=[False, True])
    tables.append_block_ids(0, ([5, 6], [7, 8]), overwrite=True)
    tables.apply_staged_writes()
    return {"slots": tables.compute_slot_mappings(int64(0), int32(0, 6), torch.arange(6), 10)}


@case(1, 3)
def prefill_inputs(lookahead: int) -> Results:
    from vllm.v1.worker.gpu.input_batch import prepare_prefill_inputs

    input_ids, next_tokens = torch.full((20,), -7, dtype=torch.int32), random_ids(9, lookahead, 4)
    token_ids = random_ids(500, 4, 30)
    prepare_prefill_inputs(input_ids, next_tokens, REQUESTS, STARTS, token_ids, PREFILL, COMPUTED)
    return {"input_ids": input_ids, "next": next_tokens}


@case()
def positions_and_lengths() -> Results:
    from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

    positions, lengths = torch.full((20,), -7), torch.full((6,), -7, dtype=torch.int32)
    prepare_pos_seq_lens(REQUESTS, STARTS, COMPUTED, positions, lengths)
    return {"positions": positions, "lengths": lengths}


@case(3, 4)
def rope_positions(axes: int) -> Results:
    from vllm.v1.worker.gpu.mm.rope import RopeState

    state = RopeState(axes, 4, 20, 30, CPU)
    state.prefill_positions.gpu.copy_(random_ids(99, 4 * axes, 30))
    state.prefill_delta.np[:] = [-3, 5, 0, -8]
    state.apply_staged_writes()
    prompts = int32(12, 9, 8, 15)
    state.prepare_positions(REQUESTS, STARTS, prompts, COMPUTED)
    return {"positions": state.get_positions(14)}


@case(0, 1)
def combine_sampled_and_drafts(new_tokens: int) -> Results:
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens

    input_ids = torch.full((20,), -7, dtype=torch.int32)
    # The last request's two rows straddle the end of its prompt, as after a preemption.
    starts, lengths = int32(0, 3, 10, 12), int32(23, 11, 9)
    cu_logits = int32(0, 3, 4, 6) if new_tokens else int32(0, 2, 3, 5)
    indices = combine_sampled_and_draft_tokens(
        input_ids,
        REQUESTS,
        torch.randint(500, (4, 1)),
        starts,
        lengths,
        PREFILL,
        torch.randint(500, (4, 2)),
        cu_logits,
        int(cu_logits[-1]),
        new_tokens,
    )
    return {"input_ids": input_ids, "indices": indices}


@case()
def sampled_and_rejected() -> Results:
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

    sampled, rejected = get_num_sampled_and_rejected(
        int32(2, 1, 1), int32(23, 11, 8), CU_LOGITS, REQUESTS, PREFILL
    )
    return {"sampled": sampled, "rejected": rejected}


@case("full", "no counts", "no query", "empty")
def after_sampling(variant: str) -> Results:
    from vllm.v1.worker.gpu.input_batch import post_update, post_update_num_computed_tokens

    requests = int64() if variant == "empty" else int64(3, -1, 2)
    computed, last_sampled = COMPUTED.clone(), torch.randint(30, (4, 1))
    counts = None if variant == "no counts" else random_ids(3, 4, 30)
    token_ids, lengths = random_ids(30, 4, 40), int32(12, 1, 8, 23)
    post_update(
        requests,
        computed,
        last_sampled,
        counts,
        torch.tensor([[7, 7, 9], [1, 2, 3], [4, 0, 0]]),
        int32(3, 2, 0),
        int32(0, 1, 2),
        None if variant == "no query" else STARTS,
        token_ids,
        lengths,
    )
    advanced = COMPUTED.clone()
    post_update_num_computed_tokens(REQUESTS, advanced, STARTS)
    out = {"computed": computed, "last": last_sampled, "ids": token_ids, "lengths": lengths}
    return out | {"advanced": advanced} | ({} if counts is None else {"counts": counts})


@case()
def expanded_requests() -> Results:
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping

    expanded, local = expand_idx_mapping(int64(3, 0, -1), 6, int32(0, 3, 3, 6), 3)
    return {"expanded": expanded, "local": local}


@case("tensor", "number")
def accepted_of_recurrent_layers(variant: str) -> Results:
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    state = object.__new__(MambaHybridModelState)
    state.num_accepted_tokens_gpu, state.recoverssm = int32(9, 9, 9, 9), None
    state._align_mode = False
    sampled = 3 if variant == "number" else int32(0, 5, 2, 7)
    state.postprocess_state(int64(3, -1, 0), sampled)
    return {"accepted": state.num_accepted_tokens_gpu}


@case(25, 17)
def states_between_blocks(computed: int) -> Results:
    """A state moves to the next block before the forward, and after it to the end of a block: of
    the same one, or of the one before."""
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    states = window, last = torch.randn(9, 4, 5), torch.randn(9, 2, 6)
    tables = [torch.stack([torch.randperm(8)[:5] + 1 for _ in range(4)]).int() for _ in range(2)]
    of_tables, of_states = (int64(*(each.data_ptr() for each in x)) for x in (tables, states))
    context = MambaSpecDecodeGPUContext(
        state_base_addrs=of_states,
        state_block_strides=int64(80, 48),
        state_elem_sizes=int32(4, 4),
        state_inner_sizes=int64(5, 12),
        state_conv_widths=int32(4, 0),
        state_group_indices=int32(1, 0),
        state_dim_row_count=int32(0, 0),
        state_dim_row_stride=int64(0, 0),
        block_size=8,
        num_states=2,
        mamba_group_ids=[0, 1],
        num_groups=2,
        num_accepted_tokens_out=int32(0, 0, 0, 0),
        block_table_ptrs=of_tables,
        aligned_index_block_table_ptrs=of_tables,
        block_table_stride_req=5,
        is_initialized=True,
    )
    state = object.__new__(MambaHybridModelState)
    state.num_accepted_tokens_gpu, state.recoverssm = int32(1, 9, 1, 3), None
    state._align_mode, state._mamba_ctx, state._mamba_group_ids = True, context, [0, 1]
    state._mamba_spec = MambaSpec(block_size=8, shapes=(), dtypes=())
    state._mamba_state_idx_gpu = int32(-1, 9, 0, 1)
    state._mamba_src_col_gpu, state._mamba_src_off_gpu = int32(7, 7, 7, 7), int32(7, 7, 7, 7)
    batch = SimpleNamespace(num_reqs=3, idx_mapping=REQUESTS, query_start_loc=STARTS)
    none: Any = None
    state.preprocess_state(cast("Any", batch), (), none, COMPUTED)
    before = {
        "column": state._mamba_state_idx_gpu.clone(),
        "reset": state.num_accepted_tokens_gpu.clone(),
        "window before": window.clone(),
        "last before": last.clone(),
    }
    advanced = int32(7, 0, 8, computed)
    state.postprocess_state(REQUESTS, int32(3, 1, 1), advanced)
    after = {"accepted": state.num_accepted_tokens_gpu, "window": window, "last": last}
    return before | after


@case()
def cleared_blocks() -> Results:
    from vllm.v1.worker.utils import KVBlockZeroer

    caches = [torch.randn(6, 40), torch.randn(6, 24)]
    zeroer = object.__new__(KVBlockZeroer)
    zeroer.device = CPU
    zeroer._meta = (
        torch.tensor([each.data_ptr() for each in caches], dtype=torch.uint64),
        int64(40, 24),
        int64(33, 24),
        3,
        16,
        2,
    )
    zeroer.zero_block_ids([4, 1])
    return {"wide": caches[0], "narrow": caches[1]}
