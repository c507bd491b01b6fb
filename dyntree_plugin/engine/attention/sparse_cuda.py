"""vLLM's sparse latent attention (DSA) on CUDA with trees.

An indexer selects the cache positions to which a row attends, so its choice is the trees' mask. All
kernels remain vLLM's: the indexer serves each row alone, with the length of a chain, and what is no
ancestor is left out between its logits and its choice. That may leave gaps in the choice of a short
row; vLLM closes them when it turns positions into slots and counts these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)

from dyntree_kernels.cuda.selection import Selectable
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.latent_layers import fill_masks, mask_buffers
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.attention.registration import with_trees
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.layer_kinds import Move

_SCALE_BYTES = 4
_stock_topk: Callable[[str], Callable[..., None]] = indexer_topk.get_indexer_topk


@dataclass
class TreeIndexerMetadata(DeepseekV32IndexerMetadata):
    """``selectable``: what the rows that vLLM counts as decodes may select."""

    selectable: Selectable | None = None


class TreeIndexerMetadataBuilder(DeepseekV32IndexerMetadataBuilder):
    """Counts requests with no more rows than a tree as decodes; others are prompts."""

    takes_tree_mask = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masks: MaskBuffers | None = None
        if tree_plan(self.vllm_config) is None:
            return  # An engine without trees may follow one with trees in the same process.
        self.masks = mask_buffers(self.vllm_config, self.device)
        self.decode_threshold = self.masks.columns
        self.use_flattening = True  # The kernel then takes as many rows as there are.
        module: Any = sparse_attn_indexer
        module.get_indexer_topk = get_indexer_topk

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> DeepseekV32IndexerMetadata:
        common, buffers = common_attn_metadata, self.masks
        found = super().build(common_prefix_len, common, fast_build)
        requests, rows = found.num_decodes, found.num_decode_tokens
        alone = tree_mask is None and common.max_query_len == 1
        if buffers is None or alone or not requests:
            return found
        starts, seq_lens = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        ctx_lens, bits = fill_masks(buffers, starts, seq_lens, rows, tree_mask)
        selectable = Selectable(ctx_lens, starts, bits, buffers.columns)
        return TreeIndexerMetadata(**vars(found), selectable=selectable)

    def warm_up(self, kv_cache: torch.Tensor, dtype: torch.dtype, table: torch.Tensor) -> None:
        """Compile kernels for batches of any size, on a request without rows."""
        if (buffers := self.masks) is None:
            return
        starts = torch.zeros(2, dtype=torch.int32, device=table.device)
        ctx_lens, bits = buffers.fill(starts, starts[1:], 1)
        nobody = Selectable(ctx_lens, starts, bits, buffers.columns)
        positions = self.vllm_config.model_config.hf_text_config.index_topk
        logits = torch.zeros(1, positions, device=table.device)
        nobody.hide(logits)
        nobody.drop(logits.view(torch.int32))


def get_indexer_topk(backend: str) -> Callable[..., None]:
    """Return vLLM's kernel that selects; rows of trees select what they may."""
    select, selectable = _stock_topk(backend), _selectable()
    if selectable is None:
        return select

    def select_visible(
        logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, selected: torch.Tensor, *of: int
    ) -> None:
        selectable.hide(logits)
        select(logits, seq_lens, next_n, selected, *of)
        selectable.drop(selected)

    return select_visible


def _selectable() -> Selectable | None:
    """Return what the rows of this forward may select, in all layers the same."""
    of_layers: Any = get_forward_context().attn_metadata
    ours = (each for each in of_layers.values() if isinstance(each, TreeIndexerMetadata))
    return next((each.selectable for each in ours), None)


class SparseTreeBuilder:
    """Precedes a builder of metadata for sparse latent attention."""

    takes_tree_mask = True

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> Any:
        stock: Any = super()
        found = stock.build(common_prefix_len, common_attn_metadata, fast_build)
        if tree_mask is None or found.prefill is None:
            return found
        # vLLM attends to short contexts whole, as to a chain. It may count trees among the prompts.
        sparse = replace(found.prefill, use_dense_mha=False, topk_mask_workspace=None)
        return replace(found, prefill=sparse)

    def warm_up(self, *_: Any) -> None:
        """Do nothing: all kernels are vLLM's."""


TreeFlashMLASparseBackend = with_trees(__name__, FlashMLASparseBackend, SparseTreeBuilder)


def index_mover(layers: Sequence[Any]) -> Move:
    """Make the `Move` of the indexer's keys: in a block, all keys come before all scales."""
    from dyntree_kernels.cuda.kv_move import KVMover

    caches = [layer.kv_cache for layer in layers]
    _, page, width = caches[0].shape
    keys, scales = page * (width - _SCALE_BYTES), page * _SCALE_BYTES
    blocks = [cache.view(len(cache), page * width) for cache in caches]
    movers = [
        KVMover([each[:, :keys].unflatten(1, (1, page, -1)) for each in blocks]),
        KVMover([each[:, keys : keys + scales].unflatten(1, (1, page, -1)) for each in blocks]),
    ]

    def move(path: torch.Tensor, roots: torch.Tensor, slots: torch.Tensor) -> None:
        for mover in movers:
            mover(path, roots, slots)

    return move
