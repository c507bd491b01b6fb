"""FlashInfer's plans of trees, by the sizes of graphs, with a fake attention."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from test_gpu_attention import COLUMNS, common

from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention import cuda_layers
from dyntree_plugin.engine.attention.kernels import AttentionRows, FlashInferTrees, Heads


class NotingAttention:
    """Replace FlashInfer's attention; note how it was made and planned."""

    made: ClassVar[list[NotingAttention]] = []

    def __init__(self, variant: str, *_: Any, **sizes: Any) -> None:
        self.sizes = sizes
        self.planned: list[list[int]] = []
        self.made.append(self)

    def plan(self, start: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> None:
        self.planned.append(lengths.tolist())

    def run(
        self, q: torch.Tensor, kv: torch.Tensor, ctx: Any, bits: Any, out: Any, features: Any
    ) -> None:
        out.fill_(len(self.planned))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FlashInferTrees:
    from dyntree_kernels.cuda import flashinfer_attention

    monkeypatch.setattr(flashinfer_attention, "FlashInferTreeAttention", NotingAttention)
    monkeypatch.setattr(flashinfer_attention, "workspace_bytes", lambda *_: 64)
    monkeypatch.setattr(NotingAttention, "made", [])
    variant: Any = "built"
    return FlashInferTrees(
        variant, Heads(4, 2, 64), 16, 250, torch.device("cpu"), processors=132, graphs=(2, 18)
    )


def rows_of(*rows: int, context: int, for_graph: bool) -> AttentionRows:
    own = common(*rows, context=context)
    mask_of = torch.zeros(len(rows)).int(), torch.zeros(sum(rows), 1).int()
    return cuda_layers._rows(own, *mask_of, COLUMNS, for_graph)


def test_flashinfer_plans_into_buffers_of_their_own_for_every_size_of_graph(
    flashinfer: FlashInferTrees,
) -> None:
    # The plan for batches without a graph exists before any request comes.
    assert [made.sizes["max_requests"] for made in NotingAttention.made] == [None]
    for requests in (2, 1, 2, 2):
        flashinfer.plan(rows_of(*[9] * requests, context=50, for_graph=True))
    flashinfer.plan(rows_of(9, 5, context=50, for_graph=False))
    sizes = [(made.sizes["max_requests"], len(made.planned)) for made in NotingAttention.made]
    assert sizes == [(None, 1), (2, 3), (1, 1)]
    flashinfer.plan(rows_of(5, 5, context=50, for_graph=True))
    assert NotingAttention.made[-1].planned == [[55, 55]]
    # 250 positions are 16 blocks.
    assert NotingAttention.made[1].sizes["max_blocks"] == 2 * 16
    assert NotingAttention.made[1].sizes["max_rows"] == 2 * 9
    (workspace,) = {id(made.sizes["workspace"]) for made in NotingAttention.made}
    assert workspace


def test_flashinfer_refuses_blocks_that_it_was_not_planned_for(flashinfer: FlashInferTrees) -> None:
    launch = flashinfer.plan(rows_of(9, context=50, for_graph=False))
    q = torch.zeros(9, 4, 64)
    launch(q, torch.zeros(8, 2, 16, 128), q, LayerFeatures(1.0))
    assert q.unique().tolist() == [1.0]
    with pytest.raises(RuntimeError, match="blocks of 16"):
        launch(q, torch.zeros(8, 2, 32, 128), q, LayerFeatures(1.0))
