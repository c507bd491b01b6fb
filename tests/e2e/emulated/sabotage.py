"""Ways to break what a CUDA engine rests on, beside those of sabotage.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def tree_moves(runner: Any) -> Iterator[None]:
    """The trees' ancestors move to another address after drafting was captured."""
    trees = runner.trees
    captured, trees.ancestors = trees.ancestors, trees.ancestors.clone()
    try:
        yield
    finally:
        trees.ancestors = captured


@contextmanager
def stale_masks(runner: Any) -> Iterator[None]:
    """The target's graphs find the ancestor bits of another batch."""
    from dyntree_plugin.engine.attention.buffers import MaskBuffers

    stock = MaskBuffers.fill

    def fill(self: Any, *args: Any, **mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bits = self._bits.clone()
        found = stock(self, *args, **mask)
        self._bits.copy_(bits)
        return found

    with mock.patch.object(MaskBuffers, "fill", fill):
        yield


@contextmanager
def padding_is_alive(runner: Any) -> Iterator[None]:
    """What fills a batch up is taken for its first request."""
    from dyntree_plugin.engine.gpu.graphs import RequestGraphs

    stock = RequestGraphs.fill

    def fill(self: Any, arguments: Sequence[torch.Tensor]) -> None:
        stock(self, arguments)
        packed = self._inputs[0].buffer
        packed[arguments[0].shape[0] :] = packed[0]

    with mock.patch.object(RequestGraphs, "fill", fill):
        yield
