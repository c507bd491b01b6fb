"""Values on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

Arrival = Callable[[], torch.Tensor]
"""Gives a tensor on the host; waits for its copy to arrive."""

Send = Callable[[torch.Tensor], Arrival]
"""Starts to copy a tensor to the host."""


def at_hand(tensor: torch.Tensor) -> Arrival:
    """Of a tensor that lies on the host."""
    return lambda: tensor
