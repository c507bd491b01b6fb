"""The cascade reads the lengths of its own forward, and leaves other sizes to Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="these kernels are written in Triton")

from flash_in_torch import Library
from noted_kernels import Kernel

from dyntree_kernels.cuda import attention
from dyntree_kernels.cuda.cascade import Cascade
from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention.kernels import AttentionRows, CascadeTrees, Heads

HEADS, PAGE, ROWS = Heads(query=4, kv=2, size=32), 16, 5
LAYERS = LayerFeatures(0.1), LayerFeatures(0.1)


@pytest.fixture(autouse=True)
def tree_part(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(attention, "_tree_attention", kernel)
    return kernel


class Noting(Library):
    """Notes the lengths of contexts that schedules are made for, and those that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduled: list[list[int]] = []
        self.read: list[list[int]] = []

    def get_scheduler_metadata(self, *given: Any, **named: Any) -> torch.Tensor:
        self.scheduled.append(named["cache_seqlens"].tolist())
        return super().get_scheduler_metadata(*given, **named)

    def flash_attn_varlen_func(self, *given: Any, **named: Any) -> Any:
        self.read.append(named["seqused_k"].tolist())
        return super().flash_attn_varlen_func(*given, **named)


def kernel(library: Library, fewest: int = 0, version: int = 3) -> CascadeTrees:
    cascade = Cascade(library, version)
    return CascadeTrees(cascade, lambda rows: rows >= fewest, HEADS, 4, 132, True)


def batch() -> AttentionRows:
    """Return a tree of five rows behind 20 positions, and a request of padding."""
    start = torch.tensor([0, ROWS, ROWS], dtype=torch.int32)
    return AttentionRows(
        torch.tensor([[1, 2], [0, 0]], dtype=torch.int32), torch.tensor([20, -1]).int(), start,
        torch.ones(ROWS, 1, dtype=torch.int32), ROWS, ROWS, start, None,
    )  # fmt: skip


@pytest.mark.parametrize("version", [3, 4])
def test_lengths_are_read_once_in_each_forward(version: int) -> None:
    library, rows = Noting(), batch()
    launch = kernel(library, version=version).plan(rows)
    q, cache = torch.randn(8, 4, 32), torch.randn(3, 2, PAGE, 64)
    out = torch.zeros_like(q)
    for length in (20, 7):
        rows.ctx_lens[0] = length
        for features in LAYERS:
            launch(q, cache, out, features)
    assert library.scheduled == ([[20, 0], [7, 0]] if version == 3 else [])
    assert library.read == [[20, 0], [20, 0], [7, 0], [7, 0]]
    assert out[:ROWS].all()
    assert not out[ROWS:].any()


def test_smaller_trees_stay_with_tritons_kernel(tree_part: Kernel) -> None:
    library = Noting()
    cascade = kernel(library, fewest=ROWS)
    q, cache = torch.randn(8, 4, 32), torch.randn(3, 2, PAGE, 64)
    cascade.plan(replace(batch(), max_rows=ROWS - 1))(q, cache, q, LAYERS[0])
    assert tree_part.compiled
    assert library.scheduled == []
    cascade.plan(batch())(q, cache, q, LAYERS[0])
    assert library.scheduled == [[20, 0]]
