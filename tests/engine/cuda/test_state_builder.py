"""Metadata of recurrent layers on CUDA, with a fake builder of vLLM's and without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from dyntree_kernels.ancestors import pack_bits
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.configuration import mark_as_tree
from dyntree_plugin.engine.states.builders import NOT_KEPT, DraftedRows
from dyntree_plugin.engine.states.cuda_layers import WithDraftsOnCUDA
from dyntree_plugin.options.options import DynTreeOptions

NODES, REQUESTS = 3, 4
COLUMNS = NODES + 1


class StockBuilder:
    def __init__(self, *_: Any) -> None:
        self.built: list[CommonAttentionMetadata] = []
        self.state_indices_tensor_d = torch.zeros(REQUESTS, COLUMNS)

    def build(self, prefix: int, common: CommonAttentionMetadata) -> str:
        self.built.append(common)
        return "stock"


class Builder(WithDraftsOnCUDA, StockBuilder):
    pass


class Mamba2Builder(WithDraftsOnCUDA, Mamba2AttentionMetadataBuilder):
    pass


@pytest.fixture
def states() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(9, 2, 5), torch.ones(9, 3, 4)


@pytest.fixture
def builder(states: tuple[torch.Tensor, ...]) -> Builder:
    return builder_of(states, None, "none")


def builder_of(
    states: tuple[torch.Tensor, ...], spec: Any, cache_mode: str, kind: type = Builder
) -> Any:
    speculation: Any = SimpleNamespace(
        method="draft_model", num_speculative_tokens=NODES, use_eagle_block_drop=lambda: False
    )
    mark_as_tree(speculation, DynTreeOptions().resolve(NODES))
    config: Any = SimpleNamespace(
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        cache_config=SimpleNamespace(
            mamba_cache_mode=cache_mode,
            use_replayssm=False,
            replayssm_buffer_len=0,
            hash_block_size=12,
            cache_hit_alignment_tokens=12,
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(kv_cache=states)},
            max_cudagraph_capture_size=None,
        ),
        num_speculative_tokens=0,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(get_mamba_chunk_size=lambda: 8),
    )
    return kind(spec, ["layer"], config, torch.device("cpu"))


def batch(*rows: int, padding: int = 0, computed: int = 20) -> CommonAttentionMetadata:
    """Return a batch whose requests have slots 5, 6, …; ``padding`` requests have no rows, but in a
    graph as many as the others."""
    lengths = torch.tensor([*rows, *[0] * padding])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    seq_lens = torch.where(lengths > 0, computed + lengths, 0).int()
    slots = torch.where(lengths > 0, torch.arange(5, 5 + len(lengths)), 0)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=sum(rows) + padding * max(rows),
        max_query_len=max(rows),
        max_seq_len=64,
        block_table_tensor=slots[:, None].int(),
        slot_mapping=torch.zeros(sum(rows) + padding * max(rows), dtype=torch.int64),
        seq_lens_cpu_upper_bound=seq_lens,
        is_prefilling=lengths > COLUMNS,
    )


def mask(drafted: int, *, rows: int = COLUMNS, has_plain: bool = False) -> TreeMask:
    star = torch.eye(rows).bool()
    star[:, 0] = True
    lengths = torch.full((drafted,), 20, dtype=torch.int32)
    return TreeMask(lengths, pack_bits(star).repeat(drafted, 1), has_plain, drafted=drafted)


def test_a_replayed_graph_reads_the_trees_of_this_step_and_no_padding(builder: Builder) -> None:
    captured = builder.build_for_cudagraph_capture(batch(*[COLUMNS] * 4))
    assert isinstance(captured, DraftedRows)
    assert (captured.rows, captured.rest, captured.trees.most) == (4 * COLUMNS, None, COLUMNS)
    metadata = builder.build(0, batch(COLUMNS, COLUMNS, padding=2), tree_mask=mask(2))
    assert (metadata.rest, builder.built) == (None, [])
    slots = captured.trees.slots
    assert (slots.tolist(), slots.stride()) == ([5, 6, NOT_KEPT, NOT_KEPT], (1,))
    assert captured.trees.ctx_lens.tolist() == [20, 20, -1, -1]
    assert captured.trees.ancestor_bits[: 2 * COLUMNS, 0].tolist() == [1, 3, 5, 9] * 2


def test_a_step_without_a_graph_runs_kernels_that_the_start_has_compiled(builder: Builder) -> None:
    def most(*rows: int) -> int:
        found: int = builder.build(0, batch(*rows), tree_mask=mask(len(rows), rows=2)).trees.most
        return found

    assert most(2) == most(2, 2) == COLUMNS
    builder.build_for_cudagraph_capture(batch(3, 3))
    assert most(2) == most(2, 2) == 3
    assert most(COLUMNS) == COLUMNS


@pytest.mark.parametrize(
    ("computed", "slots", "ends"),
    [
        (20, [5, 50], [NOT_KEPT] * 2),  # block 1 holds all rows
        (22, [6, 60], [2, 2]),  # the third and the fourth row are in block 2
        (23, [6, 60], [1, 1]),
        (24, [6, 60], [NOT_KEPT] * 2),
    ],
)
def test_a_cached_block_gets_the_state_of_its_end(
    states: tuple[torch.Tensor, ...], computed: int, slots: list[int], ends: list[int]
) -> None:
    spec = MambaSpec(block_size=12, shapes=(), dtypes=(), mamba_cache_mode="align")
    builder = builder_of(states, spec, "align")
    table = torch.tensor([[4, 5, 6], [40, 50, 60]], dtype=torch.int32)
    common = batch(COLUMNS, COLUMNS, computed=computed).replace(block_table_tensor=table)
    metadata = builder.build(0, common, tree_mask=mask(2))
    assert metadata.trees.slots.tolist() == slots
    assert builder.kept[:2, 2].tolist() == ends
    crossing = ends[0] != NOT_KEPT
    assert not crossing or builder.kept[:2, 3].tolist() == [5, 50]


def test_a_prompt_beside_trees_keeps_the_state_where_its_last_block_ends(
    states: tuple[torch.Tensor, ...],
) -> None:
    """vLLM's layer stores it within the prompt's forward."""
    spec = MambaSpec(
        block_size=12,
        shapes=(),
        dtypes=(),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
    table = torch.tensor([[4, 5, 6], [40, 50, 60]], dtype=torch.int32)
    prompt = batch(30, computed=0).replace(block_table_tensor=table[1:])
    mixed = batch(COLUMNS, 30, computed=0).replace(block_table_tensor=table)
    builder = builder_of(states, spec, "align", Mamba2Builder)
    alone = builder.build(0, prompt).checkpoint_meta
    beside = builder.build(0, mixed, tree_mask=mask(1, has_plain=True)).rest.checkpoint_meta
    for found in (alone, beside):
        assert (found.offsets, found.state_indices.tolist()) == ([24], [50])


def test_rows_without_drafts_are_a_batch_of_vllms(builder: Builder) -> None:
    metadata = builder.build(0, batch(COLUMNS, 3, 1, 7), tree_mask=mask(1, has_plain=True))
    assert (metadata.rows, metadata.rest) == (COLUMNS, "stock")
    assert builder.built[0].query_start_loc_cpu.tolist() == [0, 3, 4, 11]
    assert builder.kept[:, :2].tolist() == [[5, 1], *[[NOT_KEPT, 1]] * 3]


@pytest.mark.parametrize("rows", [(1, 1), (1, 7)])
def test_without_drafts_nothing_is_kept(builder: Builder, rows: tuple[int, ...]) -> None:
    builder.build(0, batch(COLUMNS), tree_mask=mask(1))
    assert builder.build(0, batch(*rows)) == "stock"
    assert builder.kept.eq(NOT_KEPT).all()


def test_graphs_and_other_steps_of_plain_decoding_have_slots_of_one_shape(builder: Builder) -> None:
    in_graphs, others = builder.state_indices_tensor_d, batch(1, 1).block_table_tensor
    assert in_graphs.shape[1:] == others.shape[1:]
    assert in_graphs.stride() == others.stride()


@pytest.mark.parametrize(("computed", "kept"), [(0, 0.0), (20, 1.0)])
def test_a_request_begins_with_a_state_of_zeros(
    builder: Builder, states: tuple[torch.Tensor, ...], computed: int, kept: float
) -> None:
    builder.build(0, batch(COLUMNS, computed=computed), tree_mask=mask(1))
    for state in states:
        assert state[5].eq(kept).all()
        assert state[torch.arange(9) != 5].eq(1).all()
