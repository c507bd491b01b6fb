"""Move the accepted path's KV to where a chain would have put it, in every target layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from dyntree_kernels.cpu.kv_move import KVMover
from dyntree_plugin.engine.attention.cpu import split_kv_cache


class CPUPathMover:
    """Moves accepted rows within the CPU cache of one KV cache group's target layers."""

    def __init__(self, layers: list[Attention]) -> None:
        isas: set[Any] = {layer.isa for layer in layers}
        if len(isas) != 1:
            raise RuntimeError(f"one KV cache group holds layers of several layouts: {isas}")
        keys, values = zip(*(split_kv_cache(layer.kv_cache) for layer in layers), strict=True)
        self._move = KVMover(keys, values, isas.pop())

    def __call__(self, path: torch.Tensor, roots: torch.Tensor, slots: torch.Tensor) -> None:
        """Bring node ``path[r, k]`` of every request to the place of depth ``k + 1``.

        ``path`` int64 [R, D], ``-1`` after the last accepted node; ``roots`` int64 [R]: batch row
        of each root, followed by its nodes' rows; ``slots`` int64 [T]: cache slot of every row.
        """
        step = torch.arange(path.shape[1], device=path.device)
        first, last = roots[:, None] + 1, slots.shape[0] - 1
        target = slots[(first + step).clamp(max=last)]
        source = slots[(first + path.clamp(min=0)).clamp(max=last)]
        source = torch.where((path >= 0) & (path != step), source, -1)
        self._move(source, target)
