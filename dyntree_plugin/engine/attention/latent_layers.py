"""Trees in vLLM's latent attention: mixins that precede a stock metadata builder and layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
)
from vllm.v1.attention.backend import CommonAttentionMetadata

from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.features import UNQUANTISED, WithFeatures
from dyntree_plugin.engine.attention.kernels import AttentionRows
from dyntree_plugin.engine.attention.metadata import TreeMask, without_first
from dyntree_plugin.engine.configuration import tree_plan

Metadata: TypeAlias = MLACommonMetadata[MLACommonDecodeMetadata]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LayerFeatures], None]
"""Runs a layer on ``q`` [T, H, V + R], ``cache`` [blocks, N, V + R], ``out`` [T, H, V] and the
layer's features."""


def latent_features(layer: Any) -> LayerFeatures:
    """Return what tree attention must know of a layer of vLLM's class ``MLAAttention``.

    A value is a part of its key, and has the key's scale.
    """
    impl, quantised = layer.impl, layer.kv_cache_dtype not in UNQUANTISED
    of_cache = layer._k_scale if quantised else None
    return LayerFeatures(
        scale=impl.scale,
        query_scale=layer._q_scale if quantised and impl.supports_quant_query_input else None,
        key_scale=of_cache,
        value_scale=of_cache,
    )


@dataclass
class TreeLatentMetadata(MLACommonMetadata[MLACommonDecodeMetadata]):
    """``attend`` serves all rows that vLLM counts as decodes; others are prompts. Without decodes
    and metadata of prompts it serves all rows."""

    attend: Attend | None = None


def mask_buffers(vllm_config: Any, device: torch.device) -> MaskBuffers:
    """Make the buffers for the masks of an engine's batches."""
    plan, scheduler = tree_plan(vllm_config), vllm_config.scheduler_config
    if plan is None:
        raise RuntimeError("attention for trees was chosen for an engine without them")
    columns, requests = plan.shape.node_budget + 1, scheduler.max_num_seqs
    rows = max(scheduler.max_num_batched_tokens, requests * columns)
    return MaskBuffers(requests, rows, columns, device)


def fill_masks(
    buffers: MaskBuffers,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: int,
    mask: TreeMask | None,
    chains: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return context lengths and ancestor bits of the first requests; without a mask, of chains.

    ``chains``: as in `MaskBuffers.fill`.
    """
    if mask is None:
        return buffers.fill(starts, seq_lens, rows, chains=chains)
    of_trees = mask.ctx_lens[: len(seq_lens)], mask.ancestor_bits[:rows]
    if mask.in_place:
        return of_trees
    every = not mask.has_plain
    return buffers.fill(starts, seq_lens, rows, *of_trees, all_trees=every, chains=chains)


def of_batch(common: CommonAttentionMetadata) -> dict[str, Any]:
    """Return what all metadata say of a batch."""
    names = ("num_reqs", "max_query_len", "max_seq_len", "num_actual_tokens", "query_start_loc")
    return {name: getattr(common, name) for name in (*names, "slot_mapping")}


class LatentTreeBuilder:
    """Precedes a builder of metadata for latent attention.

    Requests with no more rows than a tree come first in a batch. The kernel of trees serves them,
    those without a tree as chains. vLLM's code serves the others, which are prompts, and whole
    batches in which each of the first requests has one row. With `exactness` bits our kernel serves
    all rows of the target.
    """

    takes_tree_mask = True
    _same_bits = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.masks = mask_buffers(vllm_config, device)
        # Numbers of requests and rows for which graphs were captured.
        self._captured: set[tuple[int, int]] = set()

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Return the rows of the largest tree: the kernel reads on the device whose rows are
        whose."""
        plan = tree_plan(vllm_config)
        return None if plan is None else plan.shape.node_budget + 1

    def attend(self, rows: AttentionRows) -> Attend:
        """Plan a step for all layers."""
        raise NotImplementedError

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> Any:
        common, build = common_attn_metadata, super().build  # type: ignore[misc]
        in_place = tree_mask is not None and tree_mask.in_place
        ours, most = common.num_reqs, common.max_query_len
        if not (in_place or self._same_bits):
            ours, most = self._short(common)
        if tree_mask is None and most < 2 and not self._same_bits:
            return build(common_prefix_len, common, fast_build)
        whole = ours == common.num_reqs
        rows = common.num_actual_tokens
        if not whole:
            rows = int(common.query_start_loc_cpu[ours])  # sync: host memory
        others = None if whole else without_first(common, ours, rows)
        rest = others and build(common_prefix_len, others, fast_build)
        starts, table = common.query_start_loc[: ours + 1], common.block_table_tensor[:ours]
        seq_lens = common.seq_lens[:ours]
        for_graph = (ours, rows) in self._captured and rows == ours * most
        chains = not self._same_bits
        ctx_lens, bits = fill_masks(self.masks, starts, seq_lens, rows, tree_mask, chains)
        attended = AttentionRows(
            block_table=table,
            ctx_lens=ctx_lens,
            query_start_loc=starts,
            ancestor_bits=bits,
            num_rows=rows,
            # Each number may need another kernel; graphs compile theirs at capture.
            max_rows=most if in_place or for_graph or self._same_bits else self.masks.columns,
            query_start_loc_cpu=common.query_start_loc_cpu,
            kv_lens=None,
            seq_lens=None if in_place else seq_lens,
        )
        return TreeLatentMetadata(
            **of_batch(common),
            num_decodes=ours,
            num_decode_tokens=rows,
            num_prefills=rest.num_prefills if rest else 0,
            prefill=rest.prefill if rest else None,
            decode=MLACommonDecodeMetadata(table, seq_lens, None),
            attend=self.attend(attended),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        common = common_attn_metadata
        if common.max_query_len == 1 and not self._same_bits:
            return super().build_for_cudagraph_capture(common)  # type: ignore[misc]
        self._captured.add((common.num_reqs, common.num_actual_tokens))
        return self.build(0, common)

    def _short(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """Return how many requests come before the first one with more rows than a tree, and the
        most rows of one of them."""
        columns = self.masks.columns
        if common.max_query_len <= columns:
            return common.num_reqs, common.max_query_len
        lengths = torch.diff(common.query_start_loc_cpu)
        first = int((lengths > columns).int().argmax())  # sync: host memory
        return first, int(lengths[:first].max()) if first else 0  # sync: host memory


class LatentTreeImpl(WithFeatures):
    """Runs the kernel of trees in a stock layer of latent attention."""

    features_of = staticmethod(latent_features)
    kv_lora_rank: int

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Metadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        trees, cache = attn_metadata, kv_c_and_k_pe_cache
        if not isinstance(trees, TreeLatentMetadata) or trees.attend is None:
            stock: Any = super()
            found: tuple[torch.Tensor, torch.Tensor | None] = stock.forward_mqa(
                q, cache, trees, layer
            )
            return found
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        # Padding rows of a graph are not written. Queries may be quantised, the output is not.
        out = layer.W_UV.new_zeros(*q.shape[:2], self.kv_lora_rank)
        trees.attend(q, cache, out, self.features(layer))
        return out, None
