"""Compare FlashInfer's XQA over trees with the oracle: on a GPU, else with one in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_checks import tree_batch
from attention_inputs import tree_mask
from paged_cases import DEVICE, LAYOUTS, Case, make_case
from tree_shapes import chain
from xqa_in_torch import Library

from dyntree_kernels.cuda import xqa
from dyntree_kernels.cuda.xqa import Xqa, XqaTreeAttention

GROUP, KV_HEADS, PAGE, SIZE = 4, 2, 16, 128
MODULE = Xqa(torch.bfloat16, SIZE, GROUP, PAGE)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        stand_in = Library()
        stand_in.built.add(MODULE._arguments(2)[:-2])
        monkeypatch.setitem(sys.modules, "flashinfer.xqa", stand_in)
    else:
        pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
        if torch.cuda.get_device_capability()[0] not in (9, 12) or not MODULE.is_built():
            pytest.skip("no XQA here, or not built: python -m dyntree_kernels.cuda.build --xqa")
    yield
    xqa._loaded.cache_clear()


def paged(masks: list[torch.Tensor], contexts: list[int], layout: str = "LBNHC") -> Case:
    return make_case(
        masks, contexts, group=GROUP, kv_heads=KV_HEADS, head_size=SIZE, block_size=PAGE,
        dtype=torch.bfloat16, layout=layout, poison=0.0,
    )  # fmt: skip


def runner(case: Case) -> XqaTreeAttention:
    return XqaTreeAttention(MODULE, KV_HEADS, case.bits.shape[1], 4, DEVICE)


def run(case: Case, attention: XqaTreeAttention, out: torch.Tensor) -> None:
    rows = torch.diff(case.qo_indptr)
    attention.run(
        case.q, case.kv_cache, case.block_table, case.ctx_lens + rows, case.qo_indptr, case.bits,
        out, case.features, int(rows.max()),
    )  # fmt: skip


def check(case: Case) -> None:
    out = torch.empty_like(case.q)
    run(case, runner(case), out)
    torch.testing.assert_close(out.double().cpu(), case.expected(), atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_trees_in_every_layout(layout: str) -> None:
    check(paged(tree_batch(17, 1, 50), [50, 3, 1000], layout))


@pytest.mark.parametrize("nodes", [2, 31, 32, 33, 64, 129])
def test_trees_of_all_sizes_share_a_module(nodes: int) -> None:
    check(paged(tree_batch(nodes, 2), [20, 700]))


def test_programs_that_share_a_context_have_room() -> None:
    check(paged(tree_batch(32), [700]))


def test_queries_may_lie_apart() -> None:
    case = paged(tree_batch(9), [20])
    case.q = torch.cat([case.q, case.q], dim=1)[:, : GROUP * KV_HEADS]
    check(case)


def test_one_wrong_bit_is_noticed() -> None:
    for word, bit in ((0, 4), (0, 20), (1, 1)):
        case = paged([tree_mask(chain(40))], [20])
        case.bits[37, word] ^= 1 << bit
        with pytest.raises(AssertionError):
            check(case)


def test_what_it_would_misread_is_refused() -> None:
    case = paged(tree_batch(40), [20])
    attention, out = runner(case), torch.empty_like(case.q)
    for change, message in (
        ({"bits": case.bits[:, :1].contiguous()}, "40 rows"),
        ({"bits": case.bits.expand(1, -1, -1)[0].t().contiguous().t()}, "bits must be contiguous"),
        ({"block_table": torch.cat([case.block_table] * 2, 1)[:, ::2]}, "table must be contiguous"),
    ):
        broken = Case(**{**vars(case), **change})
        with pytest.raises(ValueError, match=message):
            run(broken, attention, out)


def test_a_captured_launch_serves_other_trees_and_leaves_its_counters_at_zero() -> None:
    first, second = (paged(tree_batch(*sizes), [300, 300]) for sizes in ((17, 9), (4, 17)))
    attention, lens = runner(first), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    q = first.q.new_zeros(34, *first.q.shape[1:])
    bits, out = first.bits.new_zeros(34, 1), torch.empty_like(q)
    cache, table, starts = (
        torch.clone(each) for each in (first.kv_cache, first.block_table, first.qo_indptr)
    )
    replay = captured(
        lambda: attention.run(q, cache, table, lens, starts, bits, out, first.features, 17)
    )
    for case in (second, first, second):
        rows = len(case.q)
        for mine, theirs in (
            (q[:rows], case.q), (bits[:rows], case.bits), (cache, case.kv_cache),
            (table, case.block_table), (starts, case.qo_indptr),
            (lens, case.ctx_lens + torch.diff(case.qo_indptr)),
        ):  # fmt: skip
            mine.copy_(theirs)
        replay()
        torch.testing.assert_close(out[:rows].double().cpu(), case.expected(), atol=1e-2, rtol=2e-2)
        assert not attention._counters.any()


def captured(launch: Callable[[], None]) -> Callable[[], None]:
    if DEVICE.type == "cpu":
        return launch
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay
