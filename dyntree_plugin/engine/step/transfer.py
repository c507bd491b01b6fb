"""Copies from the device to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

Arrival = Callable[[], torch.Tensor]
"""Wait for a copy to arrive, and return the tensor on the host."""

Send = Callable[[torch.Tensor], Arrival]
"""Start to copy a tensor to the host."""


def at_hand(tensor: torch.Tensor) -> Arrival:
    """Return an arrival for a tensor that is on the host already."""
    return lambda: tensor
