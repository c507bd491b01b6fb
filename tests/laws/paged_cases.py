"""Batches over vLLM's paged cache in every physical layout, for kernels that run on a device.

Without a GPU, the kernels run in Triton's interpreter, which TRITON_INTERPRET=1 selects before
triton is imported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from attention_inputs import AttentionCase, make_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

LAYOUTS = {  # physical order of layers, blocks, heads, positions; content is innermost
    "LBHNC": (0, 1, 2, 3),
    "LBNHC": (0, 1, 3, 2),
    "LHBNC": (0, 2, 1, 3),
    "BLHNC": (1, 0, 2, 3),
    "BLNHC": (1, 0, 3, 2),
    "BHLNC": (1, 2, 0, 3),
}


def paged_layers(
    layout: str, layers: int, blocks: int, heads: int, block_size: int, content: int
) -> torch.Tensor:
    """Return the bytes of a cache as the logical view [layers, blocks, heads, block_size,
    content]."""
    order = LAYOUTS[layout]
    sizes = (layers, blocks, heads, block_size)
    raw = torch.zeros(*(sizes[i] for i in order), content, dtype=torch.uint8, device=DEVICE)
    return raw.permute(*(order.index(i) for i in range(4)), 4)


@dataclass
class Case(AttentionCase):
    """Requests over one layer's cache."""

    kv_cache: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (
            self.q, self.kv_cache, self.block_table, self.ctx_lens, self.qo_indptr, self.bits,
        )  # fmt: skip

    def attend(
        self, out: torch.Tensor, *, by_path: bool = False, chains: bool = False, **options: Any
    ) -> None:
        """``chains``: with ``by_path``, take all requests for ones without a tree."""
        from dyntree_kernels.cuda.attention import tree_attention
        from dyntree_kernels.cuda.path_attention import PathColumns, path_attention

        run, (q, cache, table, contexts, starts, bits) = tree_attention, self.arguments
        if by_path:
            run, bits = path_attention, PathColumns.of(bits)
        if chains:
            options["seq_lens"] = contexts + torch.diff(starts)
            contexts = torch.full_like(contexts, -1)
        rows = max(mask.shape[0] for mask in self.masks)
        run(q, cache, table, contexts, starts, bits, out, self.features, max_rows=rows, **options)

    def broken(self, request: int, position: int, part: str, value: float) -> Case:
        cache, size = self.kv_cache.clone(), self.kv_cache.shape[2]
        first = self.q.shape[2] * (part == "values")
        cache[self.block_table[request, position // size], :, position % size, first + 3] = value
        return dataclasses.replace(self, kv_cache=cache)

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        return (self.kv_cache,)


def make_case(
    masks: list[torch.Tensor],
    ctx_lens: list[int],
    *,
    block_size: int = 16,
    layout: str = "LBNHC",
    poison: float = torch.nan,
    **shape: Any,
) -> Case:
    """Return a case from bool masks [rows, columns], one per request, over permuted blocks.

    Columns that no row sees, unused slots and the cache's other layer hold `poison`. ``shape``: as
    for `make_inputs`.
    """
    made = make_inputs(masks, ctx_lens, block_size=block_size, **shape)
    _, kv_heads, head_size = made.keys[0].shape
    dtype = made.keys[0].dtype
    content = (head_size + made.values[0].shape[2]) * dtype.itemsize
    layers = paged_layers(layout, 2, made.blocks, kv_heads, block_size, content).view(dtype)
    layers.copy_(torch.tensor(poison, device=DEVICE).to(dtype))
    cache = layers[1]
    # Of elements of one byte, torch assigns bytes alone by index.
    stored = cache.view(torch.uint8) if dtype.itemsize == 1 else cache
    for k, v, at, of_request in zip(made.keys, made.values, made.seen, made.table, strict=True):
        blocks_at, slots_at = of_request[at // block_size].to(DEVICE), (at % block_size).to(DEVICE)
        rows = torch.cat([k, v], -1).view(stored.dtype)
        stored[blocks_at, :, slots_at] = rows[at].to(DEVICE)
    return Case(kv_cache=cache, **made.of_case(DEVICE))
