"""vLLM's sparse latent attention (DSA) on CUDA with trees.

An indexer selects the cache positions to which a row attends, so its choice is the trees' mask. All
kernels remain vLLM's: the indexer serves each row alone, with the length of a chain, and what is no
ancestor is left out between its logits and its choice. That may leave gaps in the choice of a short
row; vLLM closes them when it turns positions into slots and counts these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.import_utils import has_deep_gemm
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseTRTLLMBackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import (
    DeepSeekV32IndexerDecodeMetadata,
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
    """``selectable``: what the rows that vLLM counts as decodes may select. ``refresh``: for
    `metadata.refresh`."""

    selectable: Selectable | None = None
    refresh: Callable[[], None] | None = None


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
        if tree_mask is not None and tree_mask.in_place:
            return self._of_draft(common, tree_mask)
        found = super().build(common_prefix_len, common, fast_build)
        requests, rows = found.num_decodes, found.num_decode_tokens
        alone = tree_mask is None and common.max_query_len == 1
        if buffers is None or alone or not requests:
            return found
        starts, seq_lens = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        ctx_lens, bits = fill_masks(buffers, starts, seq_lens, rows, tree_mask)
        selectable = Selectable(ctx_lens, starts, bits, buffers.columns)
        return TreeIndexerMetadata(**vars(found), selectable=selectable)

    def _of_draft(self, common: CommonAttentionMetadata, mask: TreeMask) -> TreeIndexerMetadata:
        """Describe a forward of a draft, all of whose rows vLLM's kernel serves alone."""
        rows, starts = common.num_actual_tokens, common.query_start_loc
        decode = DeepSeekV32IndexerDecodeMetadata(
            block_table=self.expanded_block_table_buffer[:rows],
            seq_lens=self.decode_seq_lens_buffer[:rows, None],
            decode_lens=self.decode_lens_buffer[:rows],
            requires_padding=False,
            schedule_metadata=self.scheduler_metadata_buffer,
            indices=self.decode_indices_buffer[:rows] if self.supports_varlen else None,
        )
        made = TreeIndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_decodes=common.num_reqs,
            num_decode_tokens=rows,
            num_prefills=0,
            num_prefill_tokens=0,
            decode=decode,
            block_table=common.block_table_tensor,
            selectable=Selectable(mask.ctx_lens, starts, mask.ancestor_bits, common.max_query_len),
        )
        made.refresh = partial(self._refresh, made)
        return made

    def _refresh(self, made: TreeIndexerMetadata) -> None:
        """Give every row its own length and table, and DeepGEMM its schedule."""
        decode: Any = made.decode
        selectable: Any = made.selectable
        table: Any = made.block_table
        decode.block_table.unflatten(0, (made.num_decodes, -1)).copy_(table[:, None])
        selectable.measure(decode.seq_lens, made.seq_lens)
        if decode.indices is not None:
            decode.indices.copy_(self.arange_buffer[: len(decode.indices)])
        if current_platform.is_cuda() and has_deep_gemm():
            decode.schedule_metadata = get_paged_mqa_logits_metadata(
                decode.seq_lens, self.kv_cache_spec.num_states, self.num_sms, indices=decode.indices
            )

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
        nobody.measure(torch.zeros_like(starts), starts)


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
    metadata_cls: type[Any]
    req_id_per_token_buffer: torch.Tensor
    kv_cache_spec: Any
    topk_tokens: int

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, *_: Any) -> None:
        """Return None: trees of different sizes were not compared in a graph."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> Any:
        if tree_mask is not None and tree_mask.in_place:
            return self._of_draft(common_attn_metadata)
        stock: Any = super()
        found = stock.build(common_prefix_len, common_attn_metadata, fast_build)
        if tree_mask is None or found.prefill is None:
            return found
        # vLLM attends to short contexts whole, as to a chain. It may count trees among the prompts.
        sparse = replace(found.prefill, use_dense_mha=False, topk_mask_workspace=None)
        return replace(found, prefill=sparse)

    def _of_draft(self, common: CommonAttentionMetadata) -> Any:
        """Describe a forward of a draft, which has as many rows of every request."""
        made = self.metadata_cls(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            req_id_per_token=self.req_id_per_token_buffer[: common.num_actual_tokens],
            seq_lens=common.seq_lens,
            block_size=self.kv_cache_spec.block_size,
            topk_tokens=self.topk_tokens,
            num_decodes=common.num_reqs,
            num_prefills=0,
            num_decode_tokens=common.num_actual_tokens,
            decode_max_query_len=common.max_query_len,
        )
        made.refresh = partial(self._refresh, made)
        return made

    def _refresh(self, made: Any) -> None:
        """Say whose the rows are."""
        of_rows = made.req_id_per_token.unflatten(0, (made.num_reqs, -1))
        of_rows.copy_(torch.arange(made.num_reqs, device=of_rows.device)[:, None])

    def warm_up(self, *_: Any) -> None:
        """Do nothing: all kernels are vLLM's."""


class FlashMLATreeBuilder(SparseTreeBuilder):
    """Precedes FlashMLA's, whose kernel for quantised rows has a schedule of its own."""

    fp8_use_mixed_batch: bool
    use_fp8_kv_cache: bool
    _build_fp8_mixed_decode_prefill: Callable[[], Any]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> Any:
        mixed = self.fp8_use_mixed_batch
        # With 32 and more heads, vLLM would read quantised rows of trees of several sizes as
        # prompts, by lengths that the host may not know.
        self.fp8_use_mixed_batch = mixed or tree_mask is not None
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build, tree_mask)
        finally:
            self.fp8_use_mixed_batch = mixed

    def _refresh(self, made: Any) -> None:
        super()._refresh(made)
        made.fp8_use_mixed_batch = True
        if self.use_fp8_kv_cache:  # Another schedule may lie in a graph that is not replayed.
            made.fp8_extra_metadata = self._build_fp8_mixed_decode_prefill()


TreeFlashMLASparseBackend = with_trees(__name__, FlashMLASparseBackend, FlashMLATreeBuilder)
TreeFlashInferMLASparseTRTLLMBackend = with_trees(
    __name__, FlashInferMLASparseTRTLLMBackend, SparseTreeBuilder
)


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
