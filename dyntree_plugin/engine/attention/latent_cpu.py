"""vLLM's latent attention on a CPU with trees: our kernel serves requests with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from dyntree_kernels.cpu.latent_attention import LatentTreeAttention, warm_up
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.cpu import PathMover
from dyntree_plugin.engine.attention.metadata import TreeMask, without_first
from dyntree_plugin.engine.configuration import tree_plan

Metadata: TypeAlias = MLACommonMetadata[MLACommonDecodeMetadata]


@dataclass
class TreeLatentMetadata(MLACommonMetadata[MLACommonDecodeMetadata]):
    """``attend`` serves the first ``rows`` rows. ``rest``: vLLM's metadata of the others."""

    attend: LatentTreeAttention | None = None
    rows: int = 0
    rest: Metadata | None = None


class TreeCPUMLAMetadataBuilder(MLACommonMetadataBuilder[Metadata]):
    takes_tree_mask = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        plan, scheduler = tree_plan(vllm_config), vllm_config.scheduler_config
        if plan is None:
            raise RuntimeError("attention for trees was chosen for an engine without them")
        self._buffers = MaskBuffers(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            plan.shape.node_budget + 1,
            device,
        )
        warm_up(vllm_config.model_config.dtype)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> Metadata:
        # vLLM's bounds on the host count rejected nodes of drafts, and on a CPU the lengths are
        # there.
        seq_lens = common_attn_metadata.seq_lens
        common = common_attn_metadata.replace(seq_lens_cpu_upper_bound=seq_lens)
        if tree_mask is None:
            return super().build(common_prefix_len, common, fast_build)
        drafted = common.num_reqs if tree_mask.in_place else tree_mask.drafted
        rows = int(common.query_start_loc_cpu[drafted])  # sync: host memory
        starts, table = common.query_start_loc[: drafted + 1], common.block_table_tensor[:drafted]
        masks = tree_mask.ctx_lens[:drafted], tree_mask.ancestor_bits[:rows]
        if not tree_mask.in_place:
            masks = self._buffers.fill(
                starts, seq_lens[:drafted], rows, *masks, all_trees=not tree_mask.has_plain
            )
        others = without_first(common, drafted, rows)
        rest = None if others is None else super().build(common_prefix_len, others, fast_build)
        return TreeLatentMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_decodes=drafted + (rest.num_decodes if rest else 0),
            num_decode_tokens=rows + (rest.num_decode_tokens if rest else 0),
            num_prefills=rest.num_prefills if rest else 0,
            prefill=rest.prefill if rest else None,
            decode=MLACommonDecodeMetadata(table, seq_lens[:drafted], None),
            attend=LatentTreeAttention(table, masks[0], starts, masks[1]),
            rows=rows,
            rest=rest,
        )


class TreeCPUMLAImpl(CPUMLAImpl):
    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Metadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        trees, cache = attn_metadata, kv_c_and_k_pe_cache
        if not isinstance(trees, TreeLatentMetadata) or trees.attend is None:
            return super().forward_mqa(q, cache, trees, layer)
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        out = q.new_empty(*q.shape[:2], self.kv_lora_rank)
        trees.attend(q[: trees.rows], cache, out[: trees.rows], self.scale)
        if trees.rest is not None and trees.rest.num_decodes:
            plain, _ = super().forward_mqa(q[trees.rows :], cache, trees.rest, layer)
            out[trees.rows :] = plain
        return out, None


class TreeCPUMLABackend(CPUMLABackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUMLAImpl]:
        return TreeCPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUMLAMetadataBuilder]:
        return TreeCPUMLAMetadataBuilder


def latent_mover(layers: Sequence[Any]) -> PathMover:
    """Make the `Move` of layers of one shape."""
    caches = [layer.kv_cache.view(-1, layer.head_size) for layer in layers]

    def move(source: torch.Tensor, target: torch.Tensor) -> None:
        moved = (source >= 0) & (target >= 0)
        sources, targets = source[moved], target[moved]  # sync: host memory
        for cache in caches:
            cache[targets] = cache[sources]

    return PathMover(move)
