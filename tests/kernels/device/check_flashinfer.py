"""Compare FlashInfer's kernel with ancestor bits with the oracle, on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")

import torch
from attention_inputs import draft_masks, tree_mask
from paged_cases import DEVICE, LAYOUTS, Case, make_case
from tree_shapes import chain, random_tree

if DEVICE.type != "cuda":
    pytest.skip("FlashInfer needs a GPU", allow_module_level=True)

from dyntree_kernels.cuda.flashinfer_attention import FlashInferTreeAttention
from dyntree_kernels.cuda.flashinfer_variant import Variant

HEADS, KV_HEADS, PAGE = 8, 2, 16


@pytest.fixture(scope="module")
def variant() -> Variant:
    made = Variant(torch.bfloat16, torch.bfloat16, 128)
    if not made.is_built():
        pytest.skip("FlashInfer's module is not built: python -m dyntree_kernels.cuda.build")
    return made


def paged(masks: list[torch.Tensor], contexts: list[int], layout: str = "LBNHC") -> Case:
    return make_case(
        masks, contexts, group=4, kv_heads=KV_HEADS, head_size=128, block_size=PAGE,
        dtype=torch.bfloat16, layout=layout, poison=0.0,
    )  # fmt: skip


def lengths(case: Case, slack: int = 0) -> torch.Tensor:
    width = case.block_table.shape[1] * PAGE
    columns = torch.tensor([mask.shape[1] for mask in case.masks])
    return (case.ctx_lens.cpu() + columns + slack).clamp(max=width).int()


def assert_matches(case: Case, runner: FlashInferTreeAttention, slack: int = 0) -> None:
    runner.plan(case.qo_indptr.cpu(), lengths(case, slack), case.block_table)
    out = torch.empty_like(case.q)
    runner.run(case.q, case.kv_cache, case.ctx_lens, case.bits, out, case.features)
    torch.testing.assert_close(out.double().cpu(), case.expected(), atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slack", [0, 40])
def test_ragged_trees_in_every_layout_also_with_lengths_that_are_bounds(
    variant: Variant, layout: str, slack: int
) -> None:
    masks = [tree_mask(random_tree(n, torch.Generator().manual_seed(n))) for n in (17, 1, 300)]
    runner = FlashInferTreeAttention(variant, HEADS, KV_HEADS, PAGE, DEVICE)
    assert_matches(paged(masks, [50, 0, 1000], layout), runner, slack)


def test_draft_rows_see_what_their_bits_say(variant: Variant) -> None:
    runner = FlashInferTreeAttention(variant, HEADS, KV_HEADS, PAGE, DEVICE)
    assert_matches(paged(draft_masks(), [40, 0, 63]), runner)


def test_one_wrong_bit_is_noticed(variant: Variant) -> None:
    runner = FlashInferTreeAttention(variant, HEADS, KV_HEADS, PAGE, DEVICE)
    case = paged([tree_mask(chain(33))], [20])
    case.bits[20, 0] ^= 1 << 4
    with pytest.raises(AssertionError):
        assert_matches(case, runner)


def test_a_request_without_a_tree_is_attended_causally(variant: Variant) -> None:
    case = paged([tree_mask(chain(40)), tree_mask(chain(9))], [30, 25])
    expected = case.expected()
    case.ctx_lens[0] = -1 - 30
    case.bits[:40] = 0
    runner = FlashInferTreeAttention(variant, HEADS, KV_HEADS, PAGE, DEVICE)
    runner.plan(case.qo_indptr.cpu(), torch.tensor([70, 34]).int(), case.block_table)
    out = torch.empty_like(case.q)
    runner.run(case.q, case.kv_cache, case.ctx_lens, case.bits, out, case.features)
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-2, rtol=2e-2)


def test_a_captured_graph_follows_new_trees_lengths_and_plans(variant: Variant) -> None:
    runner = FlashInferTreeAttention(
        variant, HEADS, KV_HEADS, PAGE, DEVICE, max_requests=1, max_rows=30, max_blocks=64
    )
    first, second = (
        paged([tree_mask(random_tree(30, torch.Generator().manual_seed(ctx)))], [ctx])
        for ctx in (100, 600)
    )
    q, bits, ctx_lens = first.q.clone(), first.bits.clone(), first.ctx_lens.clone()
    cache = second.kv_cache.clone()
    out = torch.empty_like(q)

    def launch() -> None:
        runner.run(q, cache, ctx_lens, bits, out, first.features)

    runner.plan(second.qo_indptr.cpu(), lengths(second), second.block_table)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for case in (second, first, second):
        cache[: case.kv_cache.shape[0]] = case.kv_cache
        for mine, theirs in ((q, case.q), (bits, case.bits), (ctx_lens, case.ctx_lens)):
            mine.copy_(theirs)
        runner.plan(case.qo_indptr.cpu(), lengths(case), case.block_table)
        graph.replay()
        torch.testing.assert_close(out.double().cpu(), case.expected(), atol=1e-2, rtol=2e-2)
