"""Sparse latent attention of the engine on CUDA: which rows select what, and where the indexer's
keys move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_cases import DEVICE

if DEVICE.type == "cuda":
    pytest.skip("its tensors are on a CPU", allow_module_level=True)
pytest.importorskip("numba")
pytest.importorskip("vllm.v1.worker.cpu.shm", exc_type=ImportError)  # patches torch.cuda

from attention_inputs import tree_mask
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonMetadataBuilder,
    SparseMLAPrefillMetadata,
)
from vllm.models.hy_v4.nvidia.flashmla_sparse import HYV4FlashMLASparseBackend
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseMetadata,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV4IndexerBackend,
    DeepseekV32IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)

from dyntree_kernels.ancestors import pack_bits
from dyntree_plugin.engine.attention import sparse_cuda
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.latent import LatentKind
from dyntree_plugin.engine.attention.metadata import TreeMask, refresh
from dyntree_plugin.engine.cuda.kinds import KINDS

FORK = [-1, 0, 0, 2]
LENGTHS, CONTEXTS = [4, 4, 1, 9], [20, 2, 30, 0]
"""A tree, a prompt's last token that vLLM has filled up with drafts, one row, and a prompt."""


def batch() -> CommonAttentionMetadata:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    lengths = (torch.tensor(LENGTHS) + torch.tensor(CONTEXTS)).int()
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=4,
        num_actual_tokens=18, max_query_len=9, max_seq_len=64,
        block_table_tensor=torch.zeros(4, 1).int(), slot_mapping=torch.zeros(18),
    )  # fmt: skip


def mask() -> TreeMask:
    bits = torch.zeros(18, 1, dtype=torch.int32)
    bits[:4] = pack_bits(tree_mask(FORK))
    bits[4:8] = 1 << 3  # of no meaning for a chain
    return TreeMask(torch.tensor([20, -1, -1, -1]).int(), bits, has_plain=True)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a builder whose stock part counts the first three requests as decodes."""

    def build(self: Any, prefix: int, common: Any, fast: bool = False) -> Any:
        counts = {"num_decodes": 3, "num_decode_tokens": 9, "num_prefills": 1}
        return DeepseekV32IndexerMetadata(
            seq_lens=common.seq_lens, max_seq_len=64, slot_mapping=common.slot_mapping,
            num_prefill_tokens=9, **counts,
        )  # fmt: skip

    monkeypatch.setattr(DeepseekV32IndexerMetadataBuilder, "build", build)
    made: Any = object.__new__(sparse_cuda.TreeIndexerMetadataBuilder)
    made.masks = MaskBuffers(8, 64, 4, torch.device("cpu"))
    return made


def selected(metadata: Any, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return which positions the decodes' rows select, at most 8, with higher logits for later
    positions."""
    lengths = torch.tensor([c + i + 1 for c, n in zip(CONTEXTS, LENGTHS, strict=True)
                            for i in range(n)][:9])  # fmt: skip
    logits = torch.arange(64.0).repeat(9, 1)
    found = torch.full((9, 8), -1, dtype=torch.int32)

    def select(logits: torch.Tensor, lengths: torch.Tensor, _: int, out: torch.Tensor) -> None:
        for row, length in enumerate(lengths.tolist()):
            count = min(length, 8)
            best = logits[row, :length].topk(count).indices if length > 8 else torch.arange(count)
            out[row, :count] = best.int()

    context = SimpleNamespace(attn_metadata={"of another layer": None, "indexer": metadata})
    monkeypatch.setattr(sparse_cuda, "get_forward_context", lambda: context)
    monkeypatch.setattr(sparse_cuda, "_stock_topk", {"per_row": select}.__getitem__)
    sparse_cuda.get_indexer_topk("per_row")(logits, lengths, 1, found)
    return [set(row.tolist()) - {-1} for row in found]


def last(length: int, *others: int) -> set[int]:
    """Return the positions of a chain's last 8, without some and with those before."""
    seen = [at for at in range(length) if at not in others]
    return set(seen[-8:])


def test_rows_of_trees_select_ancestors_and_other_rows_all_before(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = selected(builder.build(0, batch(), tree_mask=mask()), monkeypatch)
    of_tree = [last(21), last(22), last(23, 21), last(24, 21)]
    assert found == [*of_tree, *(last(2 + n) for n in range(1, 5)), last(31)]


def test_without_a_mask_rows_of_a_tree_select_as_a_chain(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control."""
    found = selected(builder.build(0, batch()), monkeypatch)
    assert found[:4] == [last(20 + n) for n in range(1, 5)]


def grown(builder: Any, columns: list[list[int]], most: int = 40) -> Any:
    """Build the metadata of a draft's forward over nodes of two trees, and fill its rows then."""
    width = len(columns[0])
    bits, contexts = torch.zeros(2 * width, 1).int(), torch.tensor([20, 30]).int()
    starts = torch.arange(3).int() * width
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=2, max_query_len=width,
        seq_lens=(contexts + 5).clamp(max=most), num_actual_tokens=2 * width, max_seq_len=64,
        block_table_tensor=torch.tensor([[5, 6], [7, 8]]).int(), slot_mapping=starts,
    )  # fmt: skip
    mask = TreeMask(contexts, bits, has_plain=False, in_place=True)
    made = builder.build(0, common, tree_mask=mask)
    of_nodes = pack_bits(tree_mask([*FORK, 3]))
    bits.copy_(torch.cat([of_nodes[each] for each in columns]))
    return made


@pytest.fixture
def of_draft() -> Any:
    """Return a builder with vLLM's memory for forwards of all widths."""
    made: Any = object.__new__(sparse_cuda.TreeIndexerMetadataBuilder)
    made.masks = None
    made.supports_varlen = True
    made.arange_buffer = torch.arange(8).int()
    made.expanded_block_table_buffer = torch.full((8, 2), -7).int()
    for name in ("decode_seq_lens", "decode_lens", "decode_indices", "scheduler_metadata"):
        setattr(made, f"{name}_buffer", torch.full((8,), -7).int())
    return made


def selected_by_draft(
    metadata: Any, monkeypatch: pytest.MonkeyPatch, *, fresh: bool = True
) -> list[list[int]]:
    """Return the columns that a forward's rows select, where they may select all positions."""
    if fresh:
        refresh({"indexer": metadata, "also": metadata, "of another layer": object()})
    lengths = metadata.decode.seq_lens
    found = torch.full((len(lengths), 64), -1).int()

    def select(logits: torch.Tensor, lengths: torch.Tensor, _: int, out: torch.Tensor) -> None:
        for row, length in enumerate(lengths.flatten().tolist()):
            out[row, :length] = torch.arange(length).int()

    context = SimpleNamespace(attn_metadata={"indexer": metadata})
    monkeypatch.setattr(sparse_cuda, "get_forward_context", lambda: context)
    monkeypatch.setattr(sparse_cuda, "_stock_topk", {"per_row": select}.__getitem__)
    sparse_cuda.get_indexer_topk("per_row")(torch.zeros(len(lengths), 64), lengths, 1, found)
    width = len(found) // 2
    return [
        [int(at) - (20, 30)[row // width] for at in each if at >= (20, 30)[row // width]]
        for row, each in enumerate(found)
    ]


def test_rows_of_a_draft_select_the_context_their_ancestors_and_themselves(
    of_draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without a refresh, rows have the lengths and tables of another forward."""
    wide, narrow = grown(of_draft, [[0, 1], [2, 4]]), grown(of_draft, [[3], [1]])
    assert selected_by_draft(wide, monkeypatch) == [[0], [0, 1], [0, 2], [0, 2, 3, 4]]
    assert wide.decode.block_table.tolist() == [[5, 6], [5, 6], [7, 8], [7, 8]]
    assert wide.decode.indices.tolist() == [0, 1, 2, 3]
    stale = selected_by_draft(narrow, monkeypatch, fresh=False)
    assert selected_by_draft(narrow, monkeypatch) == [[0, 2, 3], [0, 1]] != stale
    assert narrow.decode.block_table.tolist() == [[5, 6], [7, 8]]
    assert selected_by_draft(wide, monkeypatch) == [[0], [0, 1], [0, 2], [0, 2, 3, 4]]


def test_no_row_of_a_draft_is_longer_than_the_cache(
    of_draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grown(of_draft, [[0, 3], [2, 4]], most=33)
    assert selected_by_draft(made, monkeypatch)[2:] == [[0, 2], [0, 2]]


def test_engines_without_trees_have_vllms_metadata(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.masks = None
    metadata = builder.build(0, batch())
    assert type(metadata) is DeepseekV32IndexerMetadata
    assert selected(metadata, monkeypatch)[3] == last(24)
    builder.warm_up(torch.empty(0), torch.float32, torch.zeros(1, 1))


def test_the_indexers_builder_alone_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepseekV32IndexerBackend, "get_builder_cls", None)
    (kind,) = (each for each in KINDS if type(each).__name__ == "IndexerKind")
    for _ in range(2):
        with kind.making():
            pass
    assert DeepseekV32IndexerBackend.get_builder_cls() is sparse_cuda.TreeIndexerMetadataBuilder
    assert DeepseekV4IndexerBackend.get_builder_cls() is DeepseekV32IndexerMetadataBuilder


def test_a_backend_with_sinks_that_a_model_passes_as_a_class_builds_for_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FlashMLASparseBackend, "get_builder_cls", None)
    (kind,) = (each for each in KINDS if isinstance(each, LatentKind))
    ours = sparse_cuda.TreeFlashMLASparseBackend.get_builder_cls()
    assert kind.carries_trees(HYV4FlashMLASparseBackend)
    for _ in range(2):
        with kind.making():
            pass
        assert HYV4FlashMLASparseBackend.get_builder_cls() is ours
        assert FlashMLASparseBackend.get_builder_cls() is FlashMLASparseMetadataBuilder


def test_vllm_finds_backends_by_the_names_of_their_classes() -> None:
    (kind,) = (each for each in KINDS if isinstance(each, LatentKind))
    ours = {
        "FLASHMLA_SPARSE": sparse_cuda.TreeFlashMLASparseBackend,
        "FLASHINFER_MLA_SPARSE": sparse_cuda.TreeFlashInferMLASparseTRTLLMBackend,
    }
    for name, backend in ours.items():
        assert kind.backends[name] == f"{sparse_cuda.__name__}.{backend.__name__}"
        assert kind.carries_trees(backend)


@pytest.mark.parametrize("with_tree", [True, False])
def test_beside_trees_short_prompts_are_not_attended_to_whole(
    with_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(self: Any, prefix: int, common: Any, fast: bool = False) -> Any:
        prefill: Any = object.__new__(SparseMLAPrefillMetadata)
        prefill.__dict__.update(dict.fromkeys(SparseMLAPrefillMetadata.__dataclass_fields__))
        prefill.use_dense_mha, prefill.topk_mask_workspace = True, torch.zeros(1)
        made: Any = object.__new__(FlashMLASparseMetadata)
        made.__dict__.update(dict.fromkeys(FlashMLASparseMetadata.__dataclass_fields__))
        made.prefill = prefill
        return made

    monkeypatch.setattr(SparseMLACommonMetadataBuilder, "build", build)
    made: Any = object.__new__(sparse_cuda.TreeFlashMLASparseBackend.get_builder_cls())
    made.fp8_use_mixed_batch, made.use_fp8_kv_cache = False, False
    prefill = made.build(0, batch(), tree_mask=mask() if with_tree else None).prefill
    assert prefill.use_dense_mha is not with_tree
    assert (prefill.topk_mask_workspace is None) == with_tree


@pytest.mark.parametrize("with_tree", [True, False])
def test_quantised_rows_of_trees_are_one_batch_of_rows(
    with_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM has them where a rank has fewer than 32 heads."""
    found: Any = SimpleNamespace(prefill=None)
    monkeypatch.setattr(SparseMLACommonMetadataBuilder, "build", lambda *_: found)
    made: Any = object.__new__(sparse_cuda.TreeFlashMLASparseBackend.get_builder_cls())
    made.fp8_use_mixed_batch, made.use_fp8_kv_cache = False, True
    made._build_fp8_mixed_decode_prefill = lambda: "one batch"
    made._build_fp8_separate_prefill_decode = lambda *_: "decodes and prompts"
    metadata = made.build(0, batch(), tree_mask=mask() if with_tree else None)
    assert metadata.fp8_use_mixed_batch is with_tree
    assert not made.fp8_use_mixed_batch
    assert metadata.fp8_extra_metadata == ("one batch" if with_tree else "decodes and prompts")


def test_forwards_of_a_draft_say_whose_their_rows_are_and_have_schedules_of_their_own() -> None:
    made: Any = object.__new__(sparse_cuda.TreeFlashMLASparseBackend.get_builder_cls())
    made.fp8_use_mixed_batch, made.use_fp8_kv_cache = False, True
    made._build_fp8_mixed_decode_prefill = lambda: ["one batch"]
    made.req_id_per_token_buffer = torch.full((8,), -7).int()
    made.kv_cache_spec, made.topk_tokens = SimpleNamespace(block_size=64), 8
    wide, narrow = grown(made, [[0, 1], [2, 4]]), grown(made, [[3], [1]])
    for metadata, whose in ((wide, [0, 0, 1, 1]), (narrow, [0, 1]), (wide, [0, 0, 1, 1])):
        before = metadata.fp8_extra_metadata
        refresh({"layer": metadata})
        assert metadata.req_id_per_token.tolist() == whose
        assert metadata.fp8_use_mixed_batch
        assert metadata.fp8_extra_metadata == ["one batch"]
        assert metadata.fp8_extra_metadata is not before
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, len(whose))


def test_keys_and_scales_move_with_a_path() -> None:
    blocks, page, keys, scale = 4, 64, 128, 4
    g = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (blocks, page * (keys + scale) + 576), generator=g).byte()
    # Beside it in every block are bytes of another layer.
    cache = memory[:, : page * (keys + scale)].view(blocks, page, keys + scale)
    before = memory.clone()
    slots = torch.tensor([62, 63, 128, 129, 130, 131, 7])  # over two blocks; one of another request
    path = torch.tensor([[1, 2, 4, -1]])
    sparse_cuda.index_mover([SimpleNamespace(kv_cache=cache)])(path, torch.tensor([0]), slots)
    expected = before.clone()
    for source, target in ((128, 63), (129, 128), (131, 129)):
        for first, size in ((0, keys), (page * keys, scale)):
            to, at = (first + slot % page * size for slot in (target, source))
            found = before[source // page, at : at + size]
            expected[target // page, to : to + size] = found
    assert memory.equal(expected)
    assert not memory.equal(before)
