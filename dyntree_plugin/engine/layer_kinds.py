"""Kinds of layers: what each of them brings, so that trees pass the target's layers of that kind.

Between a tree's forward and its verification nothing that a later step reads may depend on a node,
since it may be rejected. Then what was accepted becomes permanent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

ANOTHER_MODEL = "by tree attention; use another model, or leave the dyntree options out"
"""How a reason ends if nothing about the model can be changed."""

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Move cache rows of accepted nodes to the places that a chain would have given them:
``move(path, roots, slots)``.

``path`` and ``roots`` as in `AcceptedPaths`: node ``path[r, k]`` goes to the place of depth
``k + 1``. ``slots`` int64 [T]: cache slot of every row.
"""


class AcceptedPaths(NamedTuple):
    """The accepted paths of R requests.

    ``path`` int64 [R, D]: nodes from the root down, -1 after the last. ``roots`` int64 [R]: batch
    row of each root, which its nodes' rows follow. ``requests`` int64 [R]: slots of the requests in
    the engine's states. For padding it is -1, and for requests that are gone -1 or the slot after
    all others. These have no path, and nothing of them becomes permanent.
    """

    path: torch.Tensor
    roots: torch.Tensor
    requests: torch.Tensor


class Keeper(NamedTuple):
    """Makes accepted paths permanent in layers of one KV cache group.

    ``places``: where the rows or the requests of the batch are stored, one entry for each, from the
    target's forward on. Its address stays the same, and later steps overwrite it. ``keep`` takes
    the paths, and the places of their step. It may be captured in a graph.
    """

    places: torch.Tensor
    keep: Callable[[AcceptedPaths, torch.Tensor], None]


@dataclass(frozen=True)
class LayerGroup:
    """Layers of the target, by name, that share the block table of one KV cache group.

    Their caches are there. ``slots`` int64 [rows]: cache slot of every row of a batch. ``table``
    int32 [requests, blocks]: blocks of every request of a batch. ``builders``: what builds each
    layer's metadata; several layers have the same.
    """

    layers: Mapping[str, Any]
    slots: torch.Tensor
    table: torch.Tensor
    builders: Mapping[str, Any]


class LayerKind(Protocol):
    """What one kind of layers needs for trees on one type of device."""

    def making(self) -> AbstractContextManager[None]:
        """Let vLLM give the layers that it makes within the context what trees need: the builder
        of their metadata, which takes a `TreeMask`, and their forward over rows of trees."""
        ...

    def serves(self, layer: Any) -> bool:
        """Return whether a layer of vLLM is of this kind."""
        ...

    def unserved(self, layer: Any, rows: int) -> Iterator[str]:
        """Yield why trees cannot pass a layer of this kind: what it has, and what to do.

        ``rows``: of the largest tree, its root included.
        """
        ...

    def keeper(self, group: LayerGroup) -> Keeper | None:
        """Make what keeps paths in these layers, all of this kind; None if nothing has to be
        done."""
        ...


def keepers(kinds: Iterable[LayerKind], groups: Iterable[LayerGroup]) -> list[Keeper]:
    """Make what keeps accepted paths in all layers of the target.

    Raises:
        RuntimeError: for a layer of no kind, whose paths nobody would keep.
    """
    found: list[Keeper] = []
    for group in groups:
        left = dict(group.layers)
        for kind in kinds:
            own = {name: layer for name, layer in left.items() if kind.serves(layer)}
            left = {name: layer for name, layer in left.items() if name not in own}
            keeper = kind.keeper(replace(group, layers=own)) if own else None
            if keeper is not None:
                found.append(keeper)
        if left:
            raise RuntimeError(f"layers of no kind that keeps accepted paths: {', '.join(left)}")
    return found
