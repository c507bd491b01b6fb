"""What growth reads and writes, on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TreeArrays(NamedTuple):
    """Where trees are stored by slot: the tensors of the engine's store, and `TokenTree`'s terms.

    ``parents``, ``depths`` int64 and ``values`` float32 [slots, N]; ``counts``, ``admitted``,
    ``grown`` int64 [slots]; ``ancestors`` int32 [slots, N + 1, words]; ``features`` float32
    [slots, N, 2], or [slots, 0, 2] where they are not kept.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    admitted: torch.Tensor
    grown: torch.Tensor
    ancestors: torch.Tensor
    features: torch.Tensor


class RowBuffers(NamedTuple):
    """Memory of the rows of a draft forward, R * W of them, W of each request.

    ``ids`` int32, ``positions`` int64; ``slots`` and ``scratch`` int64 [groups, …]: cache slots of
    the rows, and those behind the roots that rows may take, ``sum(widths)`` of each request.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    scratch: torch.Tensor
