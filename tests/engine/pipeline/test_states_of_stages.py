"""A stage of a pipeline keeps what a forward of drafts read until the forward's paths are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from recurrent_layers import tree_states

from dyntree_kernels.cpu.tree_layers import Layer, PathCommit, TreeForward
from dyntree_kernels.recurrence import Commit
from dyntree_plugin.engine.states import layers
from dyntree_plugin.engine.states.builders import DraftedRows

PARENTS = [[-1, 0, 0], [-1, 0]]
"""Of a request of the first forward, and of one of the second."""


class Convolution(layers.OnCPU):
    """A short convolution that sums its inputs, with states of two requests."""

    prefix = "layer"

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = [torch.zeros(3, 2, 1)]

    @property
    def layer(self) -> Layer:
        return Layer(self.history, lambda windows: windows.sum(1))


def _after_two_forwards(*, last: bool) -> tuple[Convolution, list[torch.Tensor]]:
    """Return the layer of a pipeline's last or first stage, and what its two forwards read."""
    stages: Any = SimpleNamespace(is_last_rank=last, world_size=2)
    with mock.patch.object(layers, "get_pp_group", return_value=stages):
        layer = Convolution()
    read = [torch.rand(len(parents), 1) for parents in PARENTS]
    for number, (parents, raw) in enumerate(zip(PARENTS, read, strict=True)):
        states = tree_states([parents], [number + 1])
        drafted = DraftedRows(number, torch.tensor([number]), len(raw), TreeForward(states), None)
        layer.through(drafted, raw, [], torch.empty_like(raw))
    return layer, read


def _commit(slot: int, path: list[int]) -> PathCommit:
    slots, lengths = torch.tensor([slot]), torch.tensor([len(path)])
    return PathCommit(Commit(slots, torch.tensor([path]), lengths, 0 * slots, slots))


def test_a_path_advances_a_state_by_what_its_own_forward_read() -> None:
    layer, (first, second) = _after_two_forwards(last=False)
    layer.advance(_commit(1, [0, 2]), 0)
    assert torch.equal(layer.history[1], first[[0, 2]])
    layer.advance(_commit(2, [0, 1]), 1)
    assert torch.equal(layer.history[2], second)


def test_the_last_stage_knows_paths_at_once_and_keeps_one_forward() -> None:
    layer, (_, second) = _after_two_forwards(last=True)
    with pytest.raises(KeyError):
        layer.advance(_commit(1, [0, 2]), 0)
    layer.advance(_commit(2, [0, 1]), 1)
    assert torch.equal(layer.history[2], second)
