"""vLLM's CPU attention with trees: our kernel serves trees, the stock one everything else.

Where all rows must have the bits that they have in any batch, our kernel serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from dyntree_kernels.cpu.attention import PackedCache, TreeAttention
from dyntree_kernels.cpu.kv_move import KVMover
from dyntree_kernels.features import SCALES, LayerFeatures
from dyntree_plugin.engine.attention.chains import with_chains
from dyntree_plugin.engine.attention.features import WithFeatures, element_type
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.rounding import truncates_bfloat16


@dataclass
class TreeCPUAttentionMetadata(CPUAttentionMetadata):
    """``attend`` serves the rows of trees. ``has_plain``: whether there are other rows."""

    attend: TreeAttention | None = None
    has_plain: bool = True


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    takes_tree_mask = True

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> CPUAttentionMetadata:
        if tree_mask is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        attend = self._attend(common, tree_mask)
        if tree_mask.has_plain and not tree_mask.same_bits:
            metadata = super().build(common_prefix_len, common, fast_build)
            return TreeCPUAttentionMetadata(**vars(metadata), attend=attend)
        # The stock kernel does not run for this batch, so it needs no schedule.
        return TreeCPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            attend=attend,
            has_plain=False,
        )

    def _attend(self, common: CommonAttentionMetadata, mask: TreeMask) -> TreeAttention:
        table, starts = common.block_table_tensor, common.query_start_loc
        rows = table, mask.ctx_lens, starts, mask.ancestor_bits
        if mask.same_bits:
            rows = with_chains(mask, table, starts, common.seq_lens)
        return TreeAttention(*rows, truncate=truncates_bfloat16(), by_path=mask.same_bits)


class TreeCPUAttentionImpl(WithFeatures, CPUAttentionBackendImpl):
    _kv_cache: torch.Tensor | None = None
    _packed: PackedCache | None = None
    _scales: tuple[float, float] | None = None

    def features(self, layer: Any) -> LayerFeatures:
        found = super().features(layer)
        # vLLM's kernel takes the largest scale of the heads for all; new weights may bring others.
        scales: tuple[float, float] = (layer._k_scale_float, layer._v_scale_float)
        if found.beyond & SCALES and scales != self._scales:
            of_keys, of_values = torch.tensor(scales, dtype=torch.float32)
            found = replace(found, key_scale=of_keys, value_scale=of_values)
            self._scales, self._features = scales, found
        return found

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
        trees = attn_metadata if isinstance(attn_metadata, TreeCPUAttentionMetadata) else None
        if trees is None or trees.has_plain:
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
        if trees is not None and trees.attend is not None:
            if self._packed is None or self._kv_cache is not kv_cache:
                isa: str = layer.isa  # type: ignore[attr-defined]
                halves = split_kv_cache(kv_cache.view(element_type(kv_cache.dtype)))
                self._kv_cache, self._packed = kv_cache, PackedCache(*halves, isa)
            rows = trees.num_actual_tokens
            trees.attend(query[:rows], self._packed, output[:rows], self.features(layer))
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder


def split_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the keys and the values in a layer's cache [blocks, heads, block, 2 * size].

    Both are packed as the instruction set's kernel expects them.
    """
    num_blocks, num_heads, block_size, _ = kv_cache.shape
    view = kv_cache.view(num_blocks, num_heads, 2 * block_size, -1)
    keys, values = view.chunk(2, dim=2)
    return keys, values


class PathMover:
    """A `Move` by single rows."""

    def __init__(self, move: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """``move`` copies rows from source to target cache slots, int64 [R, D]; a negative source
        moves nothing."""
        self._move = move

    def __call__(self, path: torch.Tensor, roots: torch.Tensor, slots: torch.Tensor) -> None:
        step = torch.arange(path.shape[1], device=path.device)
        first, last = roots[:, None] + 1, slots.shape[0] - 1
        target = slots[(first + step).clamp(max=last)]
        source = slots[(first + path.clamp(min=0)).clamp(max=last)]
        source = torch.where((path >= 0) & (path != step), source, -1)
        self._move(source, target)


def kv_mover(layers: Sequence[Any]) -> PathMover:
    """Make the `Move` of layers of one shape, for which vLLM uses one instruction set."""
    keys, values = zip(*(split_kv_cache(layer.kv_cache) for layer in layers), strict=True)
    return PathMover(KVMover(keys, values, layers[0].isa))
