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
        queries, keys = stock(self, positions, _flat(query), _flat(key))
        return _as_given(queries, query), None if key is None else _as_given(keys, key)

    module.forward_cpu = forward_cpu


def _flat(rows: Any) -> Any:
    return rows.flatten(1) if rows is not None and rows.dim() > 2 else rows


def _as_given(rotated: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # One head was rotated in place. With other strides, vLLM could not assign a row to itself.
    return rows if rows.dim() > 2 and rows.shape[1] == 1 else rotated.view(rows.shape)
