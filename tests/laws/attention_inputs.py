"""Random attention inputs over a paged cache, for the tests of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from dyntree_kernels.ancestors import ancestor_bits, pack_bits, unpack_bits
from dyntree_kernels.features import LayerFeatures
from dyntree_kernels.reference import masked_attention


def tree_mask(parents: list[int]) -> torch.Tensor:
    return unpack_bits(ancestor_bits(torch.tensor([parents]))[0], len(parents))


def draft_masks() -> list[torch.Tensor]:
    """Return masks with few rows and many columns, most of which no row sees."""
    g = torch.Generator().manual_seed(3)
    masks = []
    for rows, columns in ((4, 100), (2, 64), (3, 7)):
        mask = torch.rand(rows, columns, generator=g) < 0.1
        mask[:, 0] = True
        masks.append(mask)
    return masks


@dataclass(frozen=True)
class Inputs:
    """Attention inputs of R requests with T rows in all, on the host.

    ``masks`` [rows, columns] and ``ctx_lens`` are as asked for. ``keys`` and ``values`` hold one
    token-major tensor per request: the context first, then one row per mask column. ``seen`` holds,
    per request, the positions that at least one row sees. ``table`` is int64 [R, W]: the block
    numbers of each request, all below ``blocks``.
    """

    masks: list[torch.Tensor]
    ctx_lens: list[int]
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    seen: list[torch.Tensor]
    bits: torch.Tensor
    qo_indptr: torch.Tensor
    table: torch.Tensor
    blocks: int

    def of_case(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return the arguments of every `AttentionCase`."""
        size = self.values[0].shape[2]
        on_device = {
            "q": self.q,
            "ctx_lens": torch.tensor(self.ctx_lens, dtype=torch.int32),
            "qo_indptr": self.qo_indptr,
            "bits": self.bits,
            "block_table": self.table.int(),
        }
        return {
            **{name: each.to(device) for name, each in on_device.items()},
            "features": LayerFeatures(
                self.q.shape[2] ** -0.5,
                value_size=None if size == self.q.shape[2] else size,
            ),
            "masks": self.masks,
            "keys": self.keys,
            "values": self.values,
        }


def make_inputs(
    masks: list[torch.Tensor],
    ctx_lens: list[int],
    *,
    group: int = 2,
    kv_heads: int = 2,
    head_size: int = 32,
    value_size: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
    given: tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]] | None = None,
) -> Inputs:
    """Return inputs for bool masks [rows, columns], one per request, over permuted blocks.

    ``given``: `q`, `keys` and `values` in place of random ones.
    ``value_size``: elements of a value, at most ``head_size``, which is the default.
    """
    g = torch.Generator().manual_seed(seed)
    width = max(mask.shape[1] for mask in masks)
    lengths = [ctx + mask.shape[1] for ctx, mask in zip(ctx_lens, masks, strict=True)]
    table_width = max(-(-length // block_size) for length in lengths)
    blocks = 1 + table_width * len(masks)
    table = torch.randperm(blocks - 1, generator=g).view(len(masks), table_width) + 1
    keys, values, seen, bits = [], [], [], []
    for mask, ctx, length in zip(masks, ctx_lens, lengths, strict=True):
        k, v = torch.randn(2, length, kv_heads, head_size, generator=g).to(kv_dtype or dtype)
        keys.append(k)
        values.append(v[..., :value_size].contiguous())
        by_some = torch.nn.functional.pad(mask.any(0), (ctx, 0), value=True)
        seen.append(torch.arange(length)[by_some])
        bits.append(torch.nn.functional.pad(mask, (0, width - mask.shape[1])))
    counts = torch.tensor([0] + [mask.shape[0] for mask in masks])
    shape = (int(counts.sum()), group * kv_heads, head_size)
    q, keys, values = given or (torch.randn(shape, generator=g).to(dtype), keys, values)
    return Inputs(
        masks=masks,
        ctx_lens=ctx_lens,
        q=q,
        keys=keys,
        values=values,
        seen=seen,
        bits=pack_bits(torch.cat(bits)),
        qo_indptr=counts.cumsum(0).int(),
        table=table,
        blocks=blocks,
    )


@dataclass
class AttentionCase:
    """Requests over one layer's cache, which a kernel attends to. Slots that no row sees hold NaN.

    ``masks`` bool [rows, columns], ``keys`` and ``values``, token-major and the context first, are
    those of `Inputs`, one per request and on the host.
    """

    q: torch.Tensor
    block_table: torch.Tensor
    ctx_lens: torch.Tensor
    qo_indptr: torch.Tensor
    bits: torch.Tensor
    features: LayerFeatures
    masks: list[torch.Tensor] = field(repr=False)
    keys: list[torch.Tensor] = field(repr=False)
    values: list[torch.Tensor] = field(repr=False)

    def attend(self, out: torch.Tensor, **options: object) -> None:
        raise NotImplementedError

    def broken(self, request: int, position: int, part: str, value: float) -> Self:
        """Return the case with one element of each head's keys or values of a position ``value``.

        ``part`` is "keys" or "values".
        """
        raise NotImplementedError

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def without_nan(self) -> None:
        """Let slots that no row sees hold 0."""
        for cache in self.caches:
            cache.nan_to_num_()

    def free(self, window: int) -> None:
        """Put the null block in place of those that no root sees, as vLLM does."""
        size = self.caches[0].shape[2]
        for request, ctx in enumerate(self.ctx_lens.tolist()):
            self.block_table[request, : max(0, ctx - window + 1) // size] = 0

    def run(self, **options: object) -> torch.Tensor:
        out = self.q.new_full(self.out_shape, torch.nan)
        self.attend(out, **options)
        return out

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:2], self.values[0].shape[-1])

    def rows(self, request: int) -> slice:
        return slice(*self.qo_indptr[request : request + 2].tolist())

    def expected(self) -> torch.Tensor:
        """Return the oracle in float64; rows of requests without a tree are NaN."""
        out = torch.full(self.out_shape, torch.nan, dtype=torch.float64)
        for r, (mask, keys, values) in enumerate(
            zip(self.masks, self.keys, self.values, strict=True)
        ):
            ctx = int(self.ctx_lens[r])
            if ctx >= 0:
                visible = torch.nn.functional.pad(mask, (ctx, 0), value=True)
                rows = self.rows(r)
                seen = (x.to(self.q.device) for x in (self.q[rows], keys, values, visible))
                out[rows] = masked_attention(*seen, self.features).cpu()
        return out
