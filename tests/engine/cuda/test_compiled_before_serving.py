"""On CUDA, every kernel of the target's tree attention is compiled before the engine serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from noted_kernels import Kernel

pytest.importorskip("triton", reason="these kernels are written in Triton")

from dyntree_kernels.cuda import attention, splits
from dyntree_kernels.cuda.cascade import Cascade
from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.kernels import AttentionRows, CascadeTrees, Heads, TritonTrees
from dyntree_plugin.engine.cuda.runner import TreeGPUModelRunner

MOST, ROWS, PROCESSORS = 8, 200, 132


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    made = [Kernel(), Kernel()]
    monkeypatch.setattr(attention, "_tree_attention", made[0])
    monkeypatch.setattr(splits, "_reduce_splits", made[1])
    return made


def batches() -> Iterator[tuple[int, int]]:
    """Yield the numbers of requests and rows of batches of trees and prompts."""
    for requests in range(1, MOST + 1):
        yield from ((requests, rows) for rows in range(requests + 1, 40))
        yield from ((requests, rows) for rows in (64, 65, 66, 128, 199))


def triton(*given: Any) -> TritonTrees:
    return TritonTrees(*given)


def cascade(*given: Any) -> TritonTrees:
    """Return the cascade over a FlashAttention that does nothing."""
    library = SimpleNamespace(
        get_scheduler_metadata=lambda **_: None,
        flash_attn_varlen_func=lambda q, **_: (q, torch.empty(q.shape[1], len(q))),
    )
    return CascadeTrees(Cascade(library, 3), lambda rows: True, *given)


@pytest.mark.parametrize(
    ("make", "heads", "columns"),
    [
        *((triton, Heads(8, 4, 32), 17), (triton, Heads(32, 8, 128), 65)),
        *((triton, Heads(16, 16, 64), 5), (cascade, Heads(32, 8, 128), 64)),
    ],
)
def test_no_batch_of_trees_and_prompts_compiles_a_kernel(
    make: Callable[..., TritonTrees], heads: Heads, columns: int, kernels: list[Kernel]
) -> None:
    kernel = make(heads, 2, PROCESSORS, False)
    buffers = MaskBuffers(MOST, ROWS, columns, torch.device("cpu"))
    cache = torch.zeros(2, heads.kv, 16, 2 * heads.size, dtype=torch.bfloat16)
    table = torch.zeros(MOST, 8, dtype=torch.int32)
    layers = [LayerFeatures(0.1), LayerFeatures(0.1, window=128, soft_cap=50.0)]
    if make is cascade:
        del layers[1], kernels[1]  # It serves no windows, and adds up no splits.
    kernel.warm_up(cache, torch.bfloat16, table, buffers, layers)
    rehearsed = [{*each.compiled} for each in kernels]
    q = torch.zeros(ROWS, heads.query, heads.size, dtype=torch.bfloat16)
    start = torch.zeros(MOST + 1, dtype=torch.int32)
    for requests, rows in batches():
        begin = start[: requests + 1]
        lengths, bits = buffers.fill(begin, start[:requests], rows)
        batch = AttentionRows(table[:requests], lengths, begin, bits, rows, columns, begin, None)
        launch = kernel.plan(batch)
        for layer in layers:
            launch(q[:rows], cache, torch.empty_like(q[:rows]), layer)
    assert [{*each.compiled} for each in kernels] == rehearsed
    assert all(rehearsed)


def test_attention_and_grammars_are_rehearsed_for_every_group_of_layers() -> None:
    done: list[Any] = []
    builder = SimpleNamespace(warm_up=lambda *given: done.append(given))
    group = SimpleNamespace(
        layer_names=["layer"],
        get_metadata_builder=lambda _: builder,
        map_to_kernel_block_table=lambda table: f"{table}, as attention reads it",
    )
    runner: Any = object.__new__(TreeGPUModelRunner)
    runner.dtype = torch.bfloat16
    runner.compilation_config = SimpleNamespace(
        static_forward_context={"layer": SimpleNamespace(kv_cache="cache")}
    )
    runner.attn_groups = [[group], [group]]
    runner.block_tables = SimpleNamespace(input_block_tables=["first", "second"])
    runner.verifier = SimpleNamespace(rehearse=lambda: done.append("grammars"))
    runner.warm_up_rare_kernels()
    tables = [f"{each}, as attention reads it" for each in ("first", "second")]
    of_groups = [("cache", torch.bfloat16, table) for table in tables]
    assert done == [*of_groups, "grammars"]
