"""A batch of trees is padded to a graph of its tree size, or of its largest."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dyntree_plugin.engine.cuda import target_graphs
from dyntree_plugin.engine.cuda.runner import TreeGPUModelRunner
from dyntree_plugin.engine.cuda.target_graphs import (
    TILE,
    offer_larger,
    rows_of_largest,
    thin_out,
    tree_rows,
)
from dyntree_plugin.tree.budget.choice import node_buckets


@dataclass(frozen=True)
class Graph:
    num_tokens: int
    uniform_token_count: int | None
    num_active_loras: int = 0


@dataclass
class Manager:
    """Offer a batch the graphs of the next larger number of rows, as vLLM's manager does."""

    _candidates: dict[tuple[int, int], list[Graph]] = field(default_factory=dict)

    def offer(self, graphs: list[Graph]) -> Manager:
        for rows in range(1, max(graph.num_tokens for graph in graphs) + 1):
            following = min(graph.num_tokens for graph in graphs if graph.num_tokens >= rows)
            self._candidates[rows, 0] = [g for g in graphs if g.num_tokens == following]
        return self

    def dispatch(self, rows: int, uniform: int) -> Graph | None:
        offered = self._candidates[rows, 0]
        return next((g for g in offered if g.uniform_token_count in (uniform, None)), None)


def test_a_batch_between_graphs_of_another_size_finds_its_own() -> None:
    graphs = [Graph(5 * n, 5) for n in (1, 2, 4, 7, 8)] + [Graph(3 * n, 3) for n in (1, 4, 11)]
    manager = Manager().offer(graphs)
    assert manager.dispatch(30, 5) is None, "control: vLLM offers the next larger number of rows"
    offer_larger(manager)
    assert manager.dispatch(30, 5) == Graph(35, 5)
    assert manager.dispatch(30, 3) == Graph(33, 3)


MOST_ROWS = 512


def vllms_manager(
    nodes: int, requests: int, sizes: tuple[int, ...], adapters: int = 0, *, any_mix: bool = False
) -> Any:
    """Return vLLM's manager before it captures, for trees of these sizes.

    With ``adapters``, it has graphs without any, and graphs with this number and the base model.
    ``any_mix``: with vLLM's graphs for any mix of sizes.
    """
    schedule = [(batch, batch, size) for batch, size in enumerate(sorted(sizes)[::-1], start=1)]
    speculation = SimpleNamespace(
        num_speculative_tokens_per_batch_size=schedule,
        uses_dynamic_speculative_decoding=lambda: True,
    )
    manager: Any = object.__new__(CudaGraphManager)
    vars(manager).update(
        vllm_config=SimpleNamespace(
            speculative_config=speculation,
            num_speculative_tokens=nodes,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4, *range(8, 256, 8), *range(256, MOST_ROWS + 1, 16)],
            max_cudagraph_capture_size=MOST_ROWS,
        ),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_num_reqs=requests,
        decode_query_len=nodes + 1,
        varlen_decode=any_mix,
        ubatch_runner=None,
        lora_capture_cases=[0, adapters + 1] if adapters else [0],
        _lora_dispatch_map=dict.fromkeys(range(1, adapters + 2), adapters + 1) if adapters else {},
        _max_lora_case=adapters + 1,
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
    )
    manager._init_candidates()
    return manager


def rows_run(manager: Any, requests: int, nodes: int, adapters: int = 0) -> int | None:
    """Return the number of rows of the FULL graph for a batch of trees; None without one."""
    rows = requests * (nodes + 1)
    desc = manager.dispatch(requests, rows, nodes + 1, adapters)
    assert (desc.num_active_loras > 0) == (adapters > 0)
    return desc.num_tokens if desc.cg_mode == CUDAGraphMode.FULL else None


def captured(manager: Any, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> int:
    return len(manager._capture_descs[mode])


@pytest.mark.parametrize(("nodes", "requests"), [(16, 256), (63, 64), (256, 64)])
def test_few_graphs_serve_every_batch_and_pad_none_far(nodes: int, requests: int) -> None:
    sizes = node_buckets(nodes, fill_tiles=True)
    stock, thinned = (vllms_manager(nodes, requests, sizes) for _ in range(2))
    thin_out(thinned)
    for manager in (stock, thinned):
        offer_larger(manager)
    piecewise = CUDAGraphMode.PIECEWISE
    assert captured(thinned, piecewise) == captured(stock, piecewise)
    assert captured(thinned) < min(captured(stock), 80)
    for size in sizes:
        for batch in range(1, min(requests, MOST_ROWS // (size + 1)) + 1):
            rows = batch * (size + 1)
            run, before = rows_run(thinned, batch, size), rows_run(stock, batch, size)
            assert (run is None) == (before is None)
            assert run is None or rows <= run <= max(before, rows + min(TILE, rows))


def test_trees_of_one_size_keep_vllms_graphs() -> None:
    stock, manager = (vllms_manager(16, 256, (16,)) for _ in range(2))
    thin_out(manager)
    offer_larger(manager)
    assert captured(manager) == captured(stock)
    for batch in range(1, 257):
        assert rows_run(manager, batch, 16) == rows_run(stock, batch, 16)


def test_batches_with_adapters_have_as_many_graphs_of_their_own() -> None:
    sizes = node_buckets(16, fill_tiles=True)
    base, both = vllms_manager(16, 64, sizes), vllms_manager(16, 64, sizes, adapters=2)
    for manager in (base, both):
        thin_out(manager)
        offer_larger(manager)
    assert captured(both) == 2 * captured(base)
    for size in sizes:
        for batch in range(1, min(64, MOST_ROWS // (size + 1)) + 1):
            wanted = rows_run(base, batch, size)
            assert [rows_run(both, batch, size, n) for n in range(3)] == 3 * [wanted]


def test_graphs_for_any_mix_of_sizes_would_be_few() -> None:
    """docs/cuda.md says why there are none."""
    manager = vllms_manager(63, 64, node_buckets(63, fill_tiles=True), any_mix=True)
    graphs = manager._capture_descs[CUDAGraphMode.FULL]
    assert len(graphs) == 51
    assert all(desc.num_reqs == min(desc.num_tokens, 64) for desc in graphs)
    assert len(graphs) - len([*target_graphs._needless(graphs[::-1], 1)]) == 13


@pytest.mark.parametrize(
    "sizes",
    [(15,), node_buckets(16, fill_tiles=True), node_buckets(63, fill_tiles=True)],
    ids=["one", "up to 16", "up to 63"],
)
def test_trees_of_different_sizes_run_in_a_graph_of_the_largest(sizes: tuple[int, ...]) -> None:
    most = max(sizes) + 1
    manager = vllms_manager(most - 1, 64, sizes)
    thin_out(manager)
    offer_larger(manager)
    for batch in range(2, MOST_ROWS // most + 1):
        rows = np.array([most] * (batch - 1) + [1])
        total, size = int(rows.sum()), rows_of_largest(rows, tree_rows(manager))
        desc = manager.dispatch(batch, total, size, 0, max_query_len=most)
        assert (desc.cg_mode, desc.uniform_token_count) == (CUDAGraphMode.FULL, most)
        assert desc.num_reqs >= batch
        assert desc.num_tokens <= total + 2 * TILE
        alone = manager.dispatch(batch, total, None, 0, max_query_len=most)
        assert alone.cg_mode != CUDAGraphMode.FULL, "control: vLLM's graphs are for equal trees"


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((16, 1), 16),
        ((5, 3), 8),
        ((16, 16, 9, 1), 16),
        ((64, 64, 1), 64),
        # More padding than rows, and than a tile.
        ((16, 1, 1), None),
        ((64, 64, 64, 1, 1), None),
        ((65, 1), None),
    ],
)
def test_the_largest_tree_says_whose_graph_it_is(rows: tuple[int, ...], wanted: int | None) -> None:
    assert rows_of_largest(np.array(rows), (2, 4, 8, 16, 32, 64)) == wanted


@pytest.mark.parametrize(
    ("rows", "uniform", "has_prefill", "wanted"),
    [
        ((5, 3), None, False, 8),
        ((5, 3), None, True, None),
        ((4, 4), 4, False, 4),
        ((5, 5), 5, False, 8),  # no graph is of this size
        ((9, 9), 9, False, 9),
        ((1, 1), 1, False, 1),
    ],
)
def test_the_runner_asks_for_it_where_no_graph_is_of_that_size(
    monkeypatch: pytest.MonkeyPatch,
    rows: tuple[int, ...],
    uniform: int | None,
    has_prefill: bool,
    wanted: int | None,
) -> None:
    state = SimpleNamespace(has_prefill=has_prefill, num_scheduled_tokens=np.array(rows))
    monkeypatch.setattr(GPUModelRunner, "gather_batch_req_state", lambda *_: (state, uniform))
    runner: Any = object.__new__(TreeGPUModelRunner)
    runner._tree_rows = (2, 4, 8)
    assert runner.gather_batch_req_state(None, False) == (state, wanted)
