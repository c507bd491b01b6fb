"""Batches over packed caches, for the CPU's kernels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from attention_inputs import AttentionCase, make_inputs

from dyntree_kernels.cpu.attention import tree_attention
from dyntree_kernels.cpu.layout import offsets


def empty_cache(
    blocks: int, kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value halves of a cache in vLLM's shape and strides, full of NaN."""
    shape = (blocks, kv_heads, 2 * block_size, head_size)
    cache = torch.full(shape, torch.nan).to(dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    return key_cache, value_cache


def write(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    isa: str,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Pack token-major keys and values [n, Hkv, D] into `slots`."""
    blocks, heads, block_size, head_size = key_cache.shape
    at = offsets(isa, block_size, head_size)
    for cache, rows, position, lane in (
        (key_cache, keys, at.key_position, at.key_lane),
        (value_cache, values, at.value_position, at.value_lane),
    ):
        flat = cache.as_strided((blocks, heads, block_size * head_size), (*cache.stride()[:2], 1))
        element = position[slots % block_size][:, None] + lane
        if rows.element_size() == 1:  # torch has no assignment by index for them
            flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
        for head in range(heads):
            flat[:, head][(slots // block_size)[:, None], element] = rows[:, head]


@dataclass
class Case(AttentionCase):
    """A batch of requests over one packed cache."""

    isa: str
    key_cache: torch.Tensor
    value_cache: torch.Tensor

    def slots(self, positions: torch.Tensor, request: int = 0) -> torch.Tensor:
        size = self.key_cache.shape[2]
        return self.block_table[request, positions // size].long() * size + positions % size

    def attend(self, out: torch.Tensor, **options: Any) -> None:
        tree_attention(
            self.q, self.key_cache, self.value_cache, self.isa, self.block_table, self.ctx_lens,
            self.qo_indptr, self.bits, out, self.features, **options,
        )  # fmt: skip

    def broken(self, request: int, position: int, part: str, value: float) -> Case:
        kept = {"keys": self.keys[request], "values": self.values[request]}
        row = {name: rows[position : position + 1].clone() for name, rows in kept.items()}
        row[part][..., 3] = value
        caches = self.key_cache.clone(), self.value_cache.clone()
        slots = self.slots(torch.tensor([position]), request)
        write(*caches, self.isa, slots, row["keys"], row["values"])
        return dataclasses.replace(self, key_cache=caches[0], value_cache=caches[1])

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        return self.key_cache, self.value_cache


def make_case(
    masks: list[torch.Tensor],
    ctx_lens: list[int],
    *,
    block_size: int = 32,
    isa: str = "vec",
    **shape: Any,
) -> Case:
    """Return a case from bool masks [rows, columns], one per request, over permuted blocks.

    Columns that no row sees are not in the cache. ``shape``: as for `make_inputs`.
    """
    made = make_inputs(masks, ctx_lens, block_size=block_size, **shape)
    _, kv_heads, head_size = made.keys[0].shape
    caches = empty_cache(made.blocks, kv_heads, block_size, head_size, made.keys[0].dtype)
    for k, v, at, of_request in zip(made.keys, made.values, made.seen, made.table, strict=True):
        slots = of_request[at // block_size] * block_size + at % block_size
        write(*caches, isa, slots, k[at], v[at])
    return Case(isa=isa, key_cache=caches[0], value_cache=caches[1], **made.of_case())
