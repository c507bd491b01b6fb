"""Ways to break one mechanism of latent attention at a time; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def without_rope_part(runner: Any) -> Iterator[None]:
    """Leave the rotated elements out of the scores."""
    from dyntree_kernels.cpu.latent_attention import LatentTreeAttention

    stock = LatentTreeAttention.__call__

    def attend(self: Any, q: torch.Tensor, cache: Any, out: torch.Tensor, features: Any) -> None:
        values = torch.arange(q.shape[-1]) < out.shape[-1]
        stock(self, q * values, cache, out, features)

    with mock.patch.object(LatentTreeAttention, "__call__", attend):
        yield


BROKEN = (without_rope_part,)
