"""vLLM's CPU attention with trees: tree rows on our kernel, everything else on the stock one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from dyntree_kernels.cpu.attention import tree_attention
from dyntree_plugin.engine.attention.metadata import TreeMask, refuse_beyond_trees


@dataclass
class TreeCPUAttentionMetadata(CPUAttentionMetadata):
    tree_mask: TreeMask | None = None


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    takes_tree_mask = True

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> CPUAttentionMetadata:
        if tree_mask is not None and not tree_mask.has_plain:
            # The stock kernel will not run, so its schedule need not be made.
            common = common_attn_metadata
            return TreeCPUAttentionMetadata(
                num_actual_tokens=common.num_actual_tokens,
                max_query_len=common.max_query_len,
                query_start_loc=common.query_start_loc,
                max_seq_len=common.max_seq_len,
                seq_lens=common.seq_lens,
                block_table=common.block_table_tensor,
                slot_mapping=common.slot_mapping,
                scheduler_metadata=None,
                tree_mask=tree_mask,
            )
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if tree_mask is None:
            return metadata
        return TreeCPUAttentionMetadata(**vars(metadata), tree_mask=tree_mask)


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_beyond_trees(
            {
                "ALiBi": self.alibi_slopes is not None,
                "sliding window": self.sliding_window != -1,
                "logits soft cap": self.logits_soft_cap != 0,
                "attention sinks": self.sinks is not None,
                f"kv_cache_dtype={self.kv_cache_dtype!r}": self.is_fp8_kv_cache,
            }
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mask: TreeMask | None = getattr(attn_metadata, "tree_mask", None)
        if attn_metadata is None or mask is None or mask.has_plain:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if attn_metadata is None or mask is None:
            return output
        rows = attn_metadata.num_actual_tokens
        key_cache, value_cache = split_kv_cache(kv_cache)
        tree_attention(
            query[:rows],
            key_cache,
            value_cache,
            layer.isa,  # type: ignore[attr-defined]
            attn_metadata.block_table,
            mask.ctx_lens,
            attn_metadata.query_start_loc,
            mask.ancestor_bits,
            output[:rows],
            self.scale,
        )
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder


def split_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer's cache [blocks, heads, block, 2 * size], packed as the ISA has
    them."""
    num_blocks, num_heads, block_size, _ = kv_cache.shape
    view = kv_cache.view(num_blocks, num_heads, 2 * block_size, -1)
    keys, values = view.chunk(2, dim=2)
    return keys, values
