"""Rotary embeddings on the CPU: every head of a token is rotated by the token's position."""

from __future__ import annotations

import functools
from typing import Any

import torch


def mend_rotary() -> None:
    """Let vLLM's operator rotate queries and keys [tokens, heads, head size].

    That of vLLM 0.32 takes the last axis for all heads of a token, so it rotates as many heads as
    there are tokens, the first ones of the batch, by the positions of other tokens, and no other
    head. Models pass three axes in LFM2, and in latent attention whose ``rope_type`` is
    ``default``. A second call has no effect.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    module: Any = RotaryEmbedding
    stock = module.forward_cpu
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        of_key = None if key is None else _flat(key)
        queries, keys = stock(self, positions, _flat(query), of_key)
        return queries.view(query.shape), None if key is None else keys.view(key.shape)

    module.forward_cpu = forward_cpu


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten(1) if rows.dim() > 2 else rows
