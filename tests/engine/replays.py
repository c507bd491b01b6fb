"""CUDA graphs replaced by calls that run again.

A call's own memory is overwritten when it ends, because the next graph of the pool may do so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dyntree_plugin.engine.cuda.graphs import Call, Replay, Tensors


class OwnMemory(TorchDispatchMode):
    """Record the memory that is allocated while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._found += [each for each in made if address(each) not in given]
        return result

    def ruin(self, kept: Tensors) -> None:
        spared = {address(each) for each in kept}
        for each in self._found:
            if address(each) not in spared:
                each.untyped_storage().fill_(0x55)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def graph(run: Call) -> tuple[Replay, Tensors]:
    def once() -> Tensors:
        with OwnMemory() as memory:
            values = run()
        memory.ruin(values)
        return values

    return rerun(once)


def rerun(run: Call) -> tuple[Replay, Tensors]:
    """Return a graph and its results, but leave the call's own memory as it is."""
    values = run()

    def replay() -> None:
        for value, new in zip(values, run(), strict=True):
            value.copy_(new)

    return replay, values
