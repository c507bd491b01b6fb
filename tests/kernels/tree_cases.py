"""Batches over packed caches, for the CPU's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention_inputs import make_inputs

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.cpu.attention import tree_attention
from dyntree_kernels.cpu.layout import offsets
from dyntree_kernels.features import LayerFeatures
from dyntree_kernels.reference import masked_attention


def empty_cache(
    blocks: int, kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value halves of a cache in vLLM's shape and strides, full of NaN."""
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
    """A batch of requests over one packed cache. Slots that the kernel must not read hold NaN."""

    isa: str
    features: LayerFeatures
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
            self.qo_indptr, self.bits, out, self.features,
        )  # fmt: skip

    def expected(self) -> torch.Tensor:
        out = torch.full(self.q.shape, torch.nan, dtype=torch.float64)
        for r, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            ctx, rows = int(self.ctx_lens[r]), slice(*self.qo_indptr[r : r + 2].tolist())
            if ctx < 0:
                continue
            seen = unpack_bits(self.bits[rows], keys.shape[0] - ctx)
            mask = torch.nn.functional.pad(seen, (ctx, 0), value=True)
            out[rows] = masked_attention(self.q[rows], keys, values, mask, self.features)
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
    """Return a case from bool masks [rows, columns], one per request, over permuted blocks.

    Columns that no row sees are not in the cache.
    """
    made = make_inputs(
        masks, ctx_lens, group=group, kv_heads=kv_heads, head_size=head_size,
        block_size=block_size, dtype=dtype, seed=seed,
    )  # fmt: skip
    caches = empty_cache(made.blocks, kv_heads, block_size, head_size, dtype)
    for k, v, at, of_request in zip(made.keys, made.values, made.seen, made.table, strict=True):
        slots = of_request[at // block_size] * block_size + at % block_size
        write(*caches, isa, slots, k[at], v[at])
    return Case(
        isa=isa,
        features=LayerFeatures(head_size**-0.5),
        q=made.q,
        keys=made.keys,
        values=made.values,
        ctx_lens=torch.tensor(ctx_lens),
        qo_indptr=made.qo_indptr,
        bits=made.bits,
        block_table=made.table.int(),
        key_cache=caches[0],
        value_cache=caches[1],
    )
