"""Batches over a cache of latent vectors, which are keys and whose first elements are values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_inputs import AttentionCase, make_inputs


@dataclass
class LatentCase(AttentionCase):
    """Requests over the cache [blocks, N, D] of one layer, for the ``kernel``.

    ``kernel`` takes q, the cache, block table, context lengths, first rows and ancestor bits, and
    by name ``out`` and ``features``.
    """

    kernel: Callable[..., None]
    cache: torch.Tensor

    def attend(self, out: torch.Tensor, **options: object) -> None:
        self.kernel(
            self.q, self.cache, self.block_table, self.ctx_lens, self.qo_indptr, self.bits,
            out=out, features=self.features, **options,
        )  # fmt: skip

    def broken(self, request: int, position: int, part: str, value: float) -> LatentCase:
        """Keys have elements of their own, while those of values belong to keys too."""
        size = self.cache.shape[1]
        cache, block = self.cache.clone(), self.block_table[request, position // size]
        cache[block, position % size, -1 if part == "keys" else 3] = value
        return dataclasses.replace(self, cache=cache)

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        return (self.cache,)


def make_latent_case(
    kernel: Callable[..., None],
    masks: list[torch.Tensor],
    ctx_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 1,
    head_size: int = 48,
    rope: int = 16,
    block_size: int = 16,
    device: str = "cpu",
    **shape: Any,
) -> LatentCase:
    """Return a case from bool masks [rows, columns], one per request, over permuted blocks.

    ``head_size``: D, of which the last ``rope`` elements belong to no value. Columns that no row
    sees are not in the cache. ``shape``: as for `make_inputs`.
    """
    of_heads = {"group": heads, "kv_heads": kv_heads, "head_size": head_size}
    made = make_inputs(masks, ctx_lens, block_size=block_size, **of_heads, **shape)
    cache = torch.full((made.blocks, block_size, head_size), torch.nan).to(made.keys[0].dtype)
    # Of elements of one byte, torch assigns bytes alone by index.
    stored = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    for keys, at, blocks in zip(made.keys, made.seen, made.table, strict=True):
        stored[blocks[at // block_size], at % block_size] = keys.view(stored.dtype)[at, 0]
    values = [keys[..., : head_size - rope] for keys in made.keys]
    of_case = made.of_case(device) | {"values": values}
    return LatentCase(kernel=kernel, cache=cache.to(device), **of_case)
