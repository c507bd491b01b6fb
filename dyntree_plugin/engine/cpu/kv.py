"""Move the accepted path's KV to where a chain would have put it, in every target layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Brings node ``path[r, k]`` of every request to the place of depth ``k + 1``, in every layer of a
group.

``path`` int64 [R, D], ``-1`` after the last accepted node; ``roots`` int64 [R]: batch row of each
root, followed by its nodes' rows; ``slots`` int64 [T]: cache slot of every row.
"""


class PathMover:
    """A `Move` made of one of rows."""

    def __init__(self, move: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """``move`` copies rows from source to target cache slots, int64 [R, D]; a negative source
        moves nothing."""
        self._move = move

    def __call__(self, path: torch.Tensor, roots: torch.Tensor, slots: torch.Tensor) -> None:
        step = torch.arange(path.shape[1], device=path.device)
        first, last = roots[:, None] + 1, slots.shape[0] - 1
        target = slots[(first + step).clamp(max=last)]
        source = slots[(first + path.clamp(min=0)).clamp(max=last)]
        source = torch.where((path >= 0) & (path != step), source, -1)
        self._move(source, target)
