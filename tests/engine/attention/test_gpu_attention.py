"""Trees in an attention backend of vLLM on CUDA, with a fake backend and a fake kernel.

tests/kernels tests the kernels, and test_mask_buffers tests the buffers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention import cuda_layers
from dyntree_plugin.engine.attention.kernels import (
    AttentionRows,
    Heads,
    Launch,
    TritonTrees,
)
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.configuration import mark_as_tree
from dyntree_plugin.options.options import DynTreeOptions

NODES, REQUESTS = 8, 4
COLUMNS = NODES + 1


class NotingKernel:
    """Write ``mark`` to the rows that it was planned for."""

    def __init__(self, mark: float) -> None:
        self.mark = mark
        self.planned: list[AttentionRows] = []
        self.features: list[LayerFeatures] = []

    def plan(self, rows: AttentionRows) -> Launch:
        self.planned.append(rows)

        def launch(
            q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
        ) -> None:
            self.features.append(features)
            for request, ctx in enumerate(rows.ctx_lens.tolist()):
                if ctx >= 0:
                    first, last = rows.query_start_loc[request : request + 2].tolist()
                    out[first:last] = self.mark

        return launch


class StockBuilder:
    supported = AttentionCGSupport.ALWAYS

    def __init__(self, *_: Any) -> None:
        self.num_heads_q = 4

    @classmethod
    def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
        return cls.supported

    def build(self, prefix: int, common: Any, fast: bool = False) -> str:
        return "stock"

    def build_for_cudagraph_capture(self, common: Any) -> str:
        return "stock for capture"


class Builder(cuda_layers.TreeMetadataBuilder, StockBuilder):
    pass


class StockImpl:
    scale = 0.25
    logits_soft_cap = 30.0

    def forward(
        self, layer: Any, q: Any, k: Any, v: Any, kv: Any, metadata: Any, out: Any, *_: Any
    ) -> Any:
        assert metadata == "stock"
        return out.fill_(1.0)


class Impl(cuda_layers.TreeAttentionImpl, StockImpl):
    pass


def engine(*, trees: bool, **options: Any) -> Any:
    speculation: Any = SimpleNamespace(method="draft_model", num_speculative_tokens=NODES)
    if trees:
        mark_as_tree(speculation, DynTreeOptions(**options).resolve(NODES))
    return SimpleNamespace(
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(world_size=1),
    )


TREES = engine(trees=True)
SPEC: Any = SimpleNamespace(num_kv_heads=2, head_size=16)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[NotingKernel, NotingKernel]:
    """The kernels for batches of trees alone, and for other batches."""
    both = NotingKernel(2.0), NotingKernel(3.0)
    monkeypatch.setattr(cuda_layers, "choose_kernel", lambda *_: both)
    return both


@pytest.fixture
def builder(kernels: Any) -> Builder:
    return Builder(SPEC, [], TREES, torch.device("cpu"))


def common(*rows: int, context: int = 100) -> Any:
    start = torch.tensor([0, *rows]).cumsum(0).int()
    lengths = torch.tensor(rows).int() + context
    return SimpleNamespace(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(rows),
        num_actual_tokens=int(start[-1]),
        max_query_len=max(rows),
        block_table_tensor=torch.zeros(len(rows), 8, dtype=torch.int32),
        mm_req_doc_ranges=None,
        is_prefilling=torch.zeros(len(rows), dtype=torch.bool),
    )


def mask(ctx_lens: list[int], rows: int, **more: Any) -> TreeMask:
    bits = torch.randint(1, 500, (rows, 1), dtype=torch.int32)
    return TreeMask(torch.tensor(ctx_lens).int(), bits, min(ctx_lens) < 0, **more)


def layer(**more: Any) -> Any:
    """Return what an implementation reads of a layer of vLLM."""
    plain = {"sliding_window": None, "kv_cache_dtype": "auto", "query_quant": None}
    plain |= {"head_size": 16, "head_size_v": 16}
    return SimpleNamespace(impl=Impl(), **{**plain, **more})


def output_of(metadata: Any, rows: int, of: Any = None) -> list[float]:
    out, of = torch.zeros(rows, 1), of or layer()
    unused: Any = None
    of.impl.forward(of, unused, unused, unused, unused, metadata, out)
    return out.flatten().tolist()


def test_a_batch_of_trees_runs_on_the_tree_kernel_alone(builder: Builder, kernels: Any) -> None:
    found = builder.build(0, common(9, 5), tree_mask=mask([100, 100], 14))
    assert found.stock is None
    assert output_of(found, 14) == [2.0] * 14
    assert kernels[0].planned[0].max_rows == COLUMNS


def test_a_layers_features_are_made_once_and_reach_the_kernel_as_they_are(
    builder: Builder, kernels: Any
) -> None:
    scales = {name: torch.tensor(2.0) for name in ("_q_scale", "_k_scale", "_v_scale")}
    own = layer(sliding_window=16, kv_cache_dtype="fp8", query_quant="static", **scales)
    for _ in range(2):
        output_of(builder.build(0, common(9, 5), tree_mask=mask([100, 100], 14)), 14, own)
    first, second = kernels[0].features
    assert first is second
    assert (first.scale, first.window, first.soft_cap, first.chunk) == (0.25, 16, 30.0, None)
    given = first.query_scale, first.key_scale, first.value_scale
    assert all(mine is theirs for mine, theirs in zip(given, scales.values(), strict=True))
    assert first.beyond == {"window", "soft_cap", "query_scale", "key_scale", "value_scale"}


def test_a_prompt_among_trees_runs_on_the_stock_kernel(builder: Builder) -> None:
    found = builder.build(0, common(9, 1, 20), tree_mask=mask([100, -1, -1], 30))
    assert found.stock == "stock"
    assert output_of(found, 30) == [3.0] * 10 + [1.0] * 20


def test_a_batch_without_trees_is_the_stock_backends(builder: Builder, kernels: Any) -> None:
    assert builder.build(0, common(1, 1)) == "stock"
    assert builder.build(0, common(20, 1)) == "stock"
    assert output_of("stock", 3) == [1.0] * 3
    assert kernels[0].planned == kernels[1].planned == []


@pytest.mark.parametrize(
    ("rows", "own"), [((9, 5), [100, 100]), ((9, 1, 20), [100, -1, -1]), ((1, 1), None)]
)
def test_with_equal_bits_one_kernel_computes_every_batch(
    rows: tuple[int, ...], own: list[int] | None, kernels: Any
) -> None:
    builder = Builder(SPEC, [], engine(trees=True, exactness="bits"), torch.device("cpu"))
    given = None if own is None else mask(own, sum(rows))
    assert builder.build(0, common(*rows), tree_mask=given).stock is None
    (planned,) = kernels[0].planned
    assert planned.ctx_lens.tolist() == (own or [-1, -1])
    assert planned.max_rows == max(rows)
    assert planned.seq_lens.tolist() == [100 + each for each in rows]
    assert kernels[1].planned == []


def test_with_equal_bits_graphs_of_single_rows_have_that_kernel_and_drafts_have_not(
    kernels: Any,
) -> None:
    builder = Builder(SPEC, [], engine(trees=True, exactness="bits"), torch.device("cpu"))
    builder.build_for_cudagraph_capture(common(1, 1))
    assert [len(each.planned) for each in kernels] == [1, 0]
    builder.build(0, common(4, 4), tree_mask=mask([100, 100], 8, in_place=True))
    assert [len(each.planned) for each in kernels] == [1, 1]


def of_images(*rows: int, prompts: list[bool], ranges: dict[int, list[tuple[int, int]]]) -> Any:
    """Return a batch whose requests begin at position 100, and have images at ``ranges``."""
    own = common(*rows)
    own.mm_req_doc_ranges, own.is_prefilling = ranges, torch.tensor(prompts)
    return own


@pytest.mark.parametrize(
    ("image", "ours"),
    [
        ((101, 104), False),
        ((90, 102), False),  # the prefix cache holds a part
        ((103, 104), False),
        ((90, 100), True),  # rows that see no later one
        ((104, 104), True),
        ((50, 99), True),
    ],
)
def test_rows_of_an_image_among_trees_run_on_the_stock_kernel(
    image: tuple[int, int], ours: bool, builder: Builder, kernels: Any
) -> None:
    """However few they are; and so do the other requests without a tree."""
    batch = of_images(9, 5, 1, prompts=[False, True, False], ranges={0: [], 1: [image], 2: []})
    found = builder.build(0, batch, tree_mask=mask([100, -1, -1], 15))
    assert output_of(found, 15) == ([2.0] * 15 if ours else [3.0] * 9 + [1.0] * 6)
    (rows,) = kernels[not ours].planned
    assert rows.ctx_lens.tolist() == ([100] * 3 if ours else [100, -1, -1])


def test_trees_after_an_image_run_on_the_tree_kernel_alone(builder: Builder) -> None:
    batch = of_images(9, 9, prompts=[False, False], ranges={0: [(20, 30)], 1: [(95, 105)]})
    assert output_of(builder.build(0, batch, tree_mask=mask([100, 100], 18)), 18) == [2.0] * 18


def test_a_prompt_with_an_image_of_as_many_rows_as_a_tree_is_the_stock_backends(
    builder: Builder,
) -> None:
    builder.build_for_cudagraph_capture(common(9))
    batch = of_images(9, prompts=[True], ranges={0: [(101, 104)]})
    assert builder.build(0, batch) == "stock"


def test_a_layer_can_be_kept_from_the_places_of_images() -> None:
    """As Gemma-4 keeps its layers of full attention."""
    stock, none = SimpleNamespace(mm_prefix_range_tensor=torch.ones(1)), SimpleNamespace()
    unused: Any = None
    found = cuda_layers.TreeAttentionMetadata(unused, stock)
    assert found.mm_prefix_range_tensor is stock.mm_prefix_range_tensor
    found.mm_prefix_range_tensor = None
    assert stock.mm_prefix_range_tensor is None
    for without in (None, none):
        assert cuda_layers.TreeAttentionMetadata(unused, without).mm_prefix_range_tensor is None


def test_a_graph_finds_the_trees_of_later_steps_where_it_was_captured(
    builder: Builder, kernels: Any
) -> None:
    builder.build_for_cudagraph_capture(common(9, 9))
    builder.build(0, common(9, 9), tree_mask=mask([100, 100], 18))
    # The graph is padded: its second request does not exist.
    padded = common(9, 9)
    padded.query_start_loc[2] = 9
    own = mask([100], 9)
    builder.build(0, padded, tree_mask=own)
    # A prompt with as many rows as a tree uses the same graph.
    builder.build(0, common(9, 9))
    captured, *later = kernels[0].planned
    assert all(rows.for_graph for rows in kernels[0].planned)
    assert len(later) == 3
    for rows in later:
        for name in ("ctx_lens", "ancestor_bits"):
            before, now = getattr(captured, name), getattr(rows, name)
            assert (now.data_ptr(), now.shape) == (before.data_ptr(), before.shape)
        assert (rows.num_rows, rows.max_rows) == (captured.num_rows, captured.max_rows)
    assert captured.ctx_lens.tolist() == [100, 100]


def test_a_graph_serves_decodes_of_different_rows(builder: Builder, kernels: Any) -> None:
    builder.build_for_cudagraph_capture(common(9, 9, 9))
    mixed = common(9, 9, 9)
    mixed.query_start_loc[:] = torch.tensor([0, 6, 7, 7])
    mixed.max_query_len = 6
    builder.build(0, mixed, tree_mask=mask([100, -1], 7))
    captured, rows = kernels[0].planned
    assert (rows.for_graph, rows.max_rows, rows.num_rows) == (True, 9, 27)
    # The one without a tree is a chain of one row, and the third is padding.
    assert captured.ctx_lens.tolist() == [100, 108, -1]
    longer = common(9, 9, 9)
    longer.max_query_len = 10
    builder.build(0, longer, tree_mask=mask([100] * 3, 27))
    assert [rows.for_graph for rows in kernels[1].planned] == [False]


def test_a_batch_that_no_graph_was_captured_for_is_planned_without_one(
    builder: Builder, kernels: Any
) -> None:
    builder.build_for_cudagraph_capture(common(9, 9))
    for rows in ((9,), (9, 9, 9), (5, 5)):
        builder.build(0, common(*rows), tree_mask=mask([100] * len(rows), sum(rows)))
    assert [rows.for_graph for rows in kernels[0].planned] == [True, False, False, False]
    # Graphs are only for the largest tree, because other sizes might need more compiled kernels.
    assert {rows.max_rows for rows in kernels[0].planned} == {COLUMNS}


def test_masks_that_are_filled_later_are_referred_to(builder: Builder, kernels: Any) -> None:
    own = mask([100, 100], 8, in_place=True)
    builder.build(0, common(4, 4), tree_mask=own)
    (rows,) = kernels[1].planned
    assert rows.ancestor_bits is own.ancestor_bits
    assert rows.ctx_lens is own.ctx_lens
    assert rows.max_rows == 4


def test_an_engine_without_trees_keeps_the_stock_backend(kernels: Any) -> None:
    """After an engine with trees, the backend stays registered in the process."""
    plain = engine(trees=False)
    builder = Builder(SPEC, [], plain, torch.device("cpu"))
    assert builder.build(0, common(9, 9)) == "stock"
    assert builder.build_for_cudagraph_capture(common(9, 9)) == "stock for capture"
    assert Builder.get_cudagraph_support(plain, SPEC) is AttentionCGSupport.ALWAYS


def test_the_kernels_geometry_is_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of splits needs a compiled kernel, and none may be compiled while serving."""
    pytest.importorskip("triton")
    triton = TritonTrees(Heads(32, 8, 128), 2, 132, one_split=False)
    splits = [triton.splits(requests, 65) for requests in range(1, 300)]
    assert set(splits) <= {1, 2, 4, 8, 16, 32}
    assert splits == sorted(splits, reverse=True)
    assert splits[0] > splits[-1] == 1
    # docs/cuda.md has the programs of a layer that follow for a graph of any mix of trees.
    assert (triton.splits(1, 64), triton.splits(64, 64)) == (8, 1)
    assert [triton.splits(1, 65, window, 96) for window in (16, 128, 4096)] == [2, 4, splits[0]]
    alone = TritonTrees(Heads(32, 8, 128), 2, 132, one_split=True)
    assert {alone.splits(requests, 65) for requests in (1, 8, 64)} == {1}
