"""Random trees and packed caches for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dyntree_kernels.ancestors import ancestor_bits, pack_bits, unpack_bits
from dyntree_kernels.cpu.attention import tree_attention
from dyntree_kernels.cpu.layout import offsets
from dyntree_kernels.reference import masked_attention


def empty_cache(
    blocks: int, kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value halves of a cache in the shape and strides that vLLM uses, full of NaN."""
    cache = torch.full((blocks, kv_heads, 2 * block_size, head_size), torch.nan, dtype=dtype)
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
        for head in range(heads):
            flat[:, head][(slots // block_size)[:, None], element] = rows[:, head]


@dataclass
class Case:
    """A batch of requests over one packed cache; everything the kernel is not told is NaN."""

    isa: str
    scale: float
    q: torch.Tensor
    keys: list[torch.Tensor]  # per request, token-major: context, then one row per tree column
    values: list[torch.Tensor]
    ctx_lens: torch.Tensor
    qo_indptr: torch.Tensor
    bits: torch.Tensor
    block_table: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor

    def slots(self, positions: torch.Tensor, request: int = 0) -> torch.Tensor:
        size = self.key_cache.shape[2]
        return self.block_table[request, positions // size].long() * size + positions % size

    def run(self) -> torch.Tensor:
        out = torch.full_like(self.q, torch.nan)
        self.attend(out)
        return out

    def attend(self, out: torch.Tensor) -> None:
        tree_attention(
            self.q, self.key_cache, self.value_cache, self.isa, self.block_table, self.ctx_lens,
            self.qo_indptr, self.bits, out, self.scale,
        )  # fmt: skip

    def expected(self) -> torch.Tensor:
        out = torch.full(self.q.shape, torch.nan, dtype=torch.float64)
        for r, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            ctx, rows = int(self.ctx_lens[r]), slice(*self.qo_indptr[r : r + 2].tolist())
            if ctx < 0:
                continue
            seen = unpack_bits(self.bits[rows], keys.shape[0] - ctx)
            mask = torch.nn.functional.pad(seen, (ctx, 0), value=True)
            out[rows] = masked_attention(self.q[rows], keys, values, mask, self.scale)
        return out


def make_case(
    masks: list[torch.Tensor],
    ctx_lens: list[int],
    *,
    group: int = 2,
    kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    isa: str = "vec",
    seed: int = 0,
) -> Case:
    """A case from bool masks [rows, columns], one per request, over permuted blocks.

    Columns that no row sees are left out of the cache.
    """
    g = torch.Generator().manual_seed(seed)
    width = max(mask.shape[1] for mask in masks)
    lengths = [ctx + mask.shape[1] for ctx, mask in zip(ctx_lens, masks, strict=True)]
    table_width = max(-(-length // block_size) for length in lengths)
    blocks = 1 + table_width * len(masks)
    table = torch.randperm(blocks - 1, generator=g).view(len(masks), table_width) + 1
    key_cache, value_cache = empty_cache(blocks, kv_heads, block_size, head_size, dtype)
    keys, values, bits = [], [], []
    for mask, ctx, blocks_of, length in zip(masks, ctx_lens, table, lengths, strict=True):
        position = torch.arange(length)
        slots = blocks_of[position // block_size] * block_size + position % block_size
        k, v = torch.randn(2, length, kv_heads, head_size, generator=g).to(dtype)
        seen = torch.nn.functional.pad(mask.any(0), (ctx, 0), value=True)
        write(key_cache, value_cache, isa, slots[seen], k[seen], v[seen])
        keys.append(k)
        values.append(v)
        bits.append(torch.nn.functional.pad(mask, (0, width - mask.shape[1])))
    counts = torch.tensor([0] + [mask.shape[0] for mask in masks])
    shape = (int(counts.sum()), group * kv_heads, head_size)
    return Case(
        isa=isa,
        scale=head_size**-0.5,
        q=torch.randn(shape, generator=g).to(dtype),
        keys=keys,
        values=values,
        ctx_lens=torch.tensor(ctx_lens),
        qo_indptr=counts.cumsum(0).int(),
        bits=pack_bits(torch.cat(bits)),
        block_table=table.int(),
        key_cache=key_cache,
        value_cache=value_cache,
    )


def tree_mask(parents: list[int]) -> torch.Tensor:
    return unpack_bits(ancestor_bits(torch.tensor([parents]))[0], len(parents))
