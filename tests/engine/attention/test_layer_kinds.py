"""Accepted paths become permanent in every layer of a target once, whatever layers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention

from dyntree_plugin.engine.attention import kind
from dyntree_plugin.engine.cpu.kinds import KINDS
from dyntree_plugin.engine.layer_kinds import AcceptedPaths, Keeper, LayerGroup, keepers

BLOCK, ROWS = 32, 6
PATH = torch.tensor([[1, 2, 4, -1]])
"""Nodes of the request's only tree. Its root is row 0, so node n is row n + 1."""
ON_PATH = [0, 2, 3, 5]
"""The rows of the root and the accepted nodes, where the tree put them."""


def cache(head_size: int = 32) -> torch.Tensor:
    """Return a cache [blocks, heads, block, 2 * size] whose numbers all differ."""
    return torch.arange(4 * 2 * BLOCK * 2 * head_size).float().view(4, 2, BLOCK, -1)


def layer(memory: torch.Tensor) -> Any:
    made: Any = object.__new__(Attention)
    torch.nn.Module.__init__(made)
    made.kv_cache, made.isa = memory, "vec"
    return made


def group(*memories: torch.Tensor, block: int = 1) -> LayerGroup:
    """Return the layers of a group whose request has one block."""
    layers = {f"layers.{number}": layer(each) for number, each in enumerate(memories)}
    table = torch.tensor([[block]], dtype=torch.int32)
    return LayerGroup(layers, block * BLOCK + torch.arange(ROWS), table, {})


def keep(made: Iterable[Keeper]) -> None:
    for keeper in made:
        keeper.keep(AcceptedPaths(PATH, torch.tensor([0]), torch.tensor([0])), keeper.places)


def rows(memory: torch.Tensor, block: int = 1) -> torch.Tensor:
    """Return the values of the batch's rows, [rows, heads, size]."""
    size = memory.shape[3] // 2
    values = memory.reshape(4, 2, 2 * BLOCK, size)[block, :, BLOCK:]
    return values.transpose(0, 1)[:ROWS].clone()


def test_a_cache_that_layers_share_is_moved_once() -> None:
    shared = cache()
    before = rows(shared)
    keep(keepers(KINDS, [group(shared, shared)]))
    assert rows(shared)[: len(ON_PATH)].equal(before[ON_PATH])


def test_a_cache_that_is_moved_twice_loses_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "_by_shape", lambda layers: [[each] for each in layers])
    shared = cache()
    before = rows(shared)
    keep(keepers(KINDS, [group(shared, shared)]))
    assert not rows(shared)[: len(ON_PATH)].equal(before[ON_PATH])


def test_groups_that_use_other_blocks_of_one_memory_are_all_moved() -> None:
    memory = cache()
    before = [rows(memory, block) for block in (1, 3)]
    keep(keepers(KINDS, [group(memory, block=1), group(memory, block=3)]))
    for block, own in zip((1, 3), before, strict=True):
        assert rows(memory, block)[: len(ON_PATH)].equal(own[ON_PATH])


def test_layers_of_two_shapes_in_one_group_are_moved() -> None:
    memories = cache(), cache(64), cache()
    before = [rows(each) for each in memories]
    (keeper,) = made = keepers(KINDS, [group(*memories)])
    keep(made)
    for memory, own in zip(memories, before, strict=True):
        assert rows(memory)[: len(ON_PATH)].equal(own[ON_PATH])
    assert keeper.places.tolist() == [BLOCK + row for row in range(ROWS)]


class Recurrent:
    """A layer that has one state for each request."""


class StateKind:
    """Notes what would be committed to the state of the first request."""

    def __init__(self) -> None:
        self.states = torch.tensor([7])
        self.committed: list[tuple[list[int], int]] = []

    def serves(self, layer: Any) -> bool:
        return isinstance(layer, Recurrent)

    def keeper(self, group: LayerGroup) -> Keeper | None:
        return Keeper(self.states, self.commit)

    def commit(self, accepted: AcceptedPaths, states: torch.Tensor) -> None:
        self.committed.append((accepted.path[0].tolist(), int(states[accepted.requests[0]])))


def test_layers_of_several_kinds_share_a_group() -> None:
    own: Any = StateKind()
    memory = cache()
    before = rows(memory)
    both = group(memory)
    mixed = LayerGroup({**both.layers, "state": Recurrent()}, both.slots, both.table, {})
    keep(keepers([*KINDS, own], [mixed]))
    assert own.committed == [(PATH[0].tolist(), 7)]
    assert rows(memory)[: len(ON_PATH)].equal(before[ON_PATH])
    with pytest.raises(RuntimeError, match="no kind that keeps accepted paths: state"):
        keepers(KINDS, [mixed])
