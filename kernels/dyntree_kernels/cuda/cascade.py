"""Tree attention in two passes: FlashAttention reads the context, Triton's kernel adds the tree.

Every row of a tree sees the whole context, so that the first pass needs no mask (cascade inference,
arXiv 2501.01005). The second goes on from its output and log-sum-exp. Neither plans on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dyntree_kernels.cuda.attention import Tiling, _processors, tiling, tree_attention
from dyntree_kernels.features import LayerFeatures

_TILE = 128
"""Rows of a head group that a program of FlashAttention takes."""


def tree_tiling(head_size: int, rows: int) -> Tiling:
    """Tiles of trees for `rows` packed rows per request and KV head.

    They spill on neither sm_90 nor sm_100, where wider ones do. Most trees need one or two.
    """
    tile = tiling(head_size, rows, 2)
    return Tiling(tile.block_m, 32, 8 if tile.block_m == 32 else tile.warps, tile.stages)


@dataclass(frozen=True)
class Contexts:
    """What FlashAttention reads of a step's requests: ``lengths`` int32 [R] of their contexts, its
    ``schedule`` for them, and the most ``splits`` of a context."""

    lengths: torch.Tensor
    schedule: torch.Tensor | None
    splits: int


@dataclass(frozen=True)
class Cascade:
    """Computes tree attention with a FlashAttention.

    The arguments of its methods are those of `dyntree_kernels.cuda.attention.tree_attention`. Two
    things differ from the contract in `dyntree_kernels`: all slots of a request's blocks must hold
    finite numbers, and its context lies in the blocks of its table.

    Args:
        library: a module like ``vllm.vllm_flash_attn``.
        version: 3 or 4, of the FlashAttention to use.
    """

    library: Any
    version: int

    @property
    def name(self) -> str:
        """Name of the way for the reader."""
        return f"cascade over FlashAttention {self.version}"

    def is_built(self) -> bool:
        """Return True: vLLM brings FlashAttention."""
        return True

    def contexts(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        ctx_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        max_rows: int,
    ) -> Contexts:
        """Prepare the contexts of a step for all of its layers, on the device alone.

        In a graph it must be captured together with the layers, since lengths change.
        """
        lengths = ctx_lens.clamp(min=0)
        if self.version != 3:
            return Contexts(lengths, None, 0)
        heads, (kv_heads, page) = q.shape[1], kv_cache.shape[1:3]
        tiles = -(-max_rows * heads // (kv_heads * _TILE))
        programs = max(1, len(ctx_lens) * kv_heads * tiles)
        splits = max(1, min(32, 2 * _processors(q.device) // programs))
        schedule = self.library.get_scheduler_metadata(
            batch_size=len(ctx_lens),
            max_seqlen_q=max_rows,
            max_seqlen_k=block_table.shape[1] * page,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=q.shape[2],
            cache_seqlens=lengths,
            qkv_dtype=q.dtype,
            cu_seqlens_q=qo_indptr,
            page_size=page,
            causal=False,
            num_splits=splits,
        )
        return Contexts(lengths, schedule, splits)

    def run(
        self,
        contexts: Contexts,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        ctx_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        ancestor_bits: torch.Tensor,
        out: torch.Tensor,
        features: LayerFeatures,
        max_rows: int,
    ) -> None:
        """Compute one layer, and write `out`; rows of requests without a tree may hold anything.

        Raises:
            ValueError: for features that are not served.
        """
        features.check("cascade")
        paged = kv_cache
        if kv_cache.shape[1] == 1:
            # A dimension of one may have any stride; FlashAttention wants multiples of 16 bytes.
            block, _, slot, _ = kv_cache.stride()
            paged = kv_cache.as_strided(kv_cache.shape, (block, slot, slot, 1))
        keys, values = paged.transpose(1, 2).chunk(2, dim=3)
        _, lse = self.library.flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=qo_indptr,
            max_seqlen_q=max_rows,
            seqused_k=contexts.lengths,
            max_seqlen_k=block_table.shape[1] * kv_cache.shape[2],
            softmax_scale=features.scale,
            causal=False,
            block_table=block_table,
            return_softmax_lse=True,
            scheduler_metadata=contexts.schedule,
            num_splits=contexts.splits,
            fa_version=self.version,
        )
        tree_attention(
            q, kv_cache, block_table, ctx_lens, qo_indptr, ancestor_bits, out, features,
            max_rows=max_rows, context_lse=lse,
            tiles=tree_tiling(q.shape[2], max_rows * q.shape[1] // kv_cache.shape[1]),
        )  # fmt: skip
