"""Trees in vLLM's attention on CUDA: mixins that precede a stock metadata builder and layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.composite import requires_mm_prefix

from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.choice import choose_kernel
from dyntree_plugin.engine.attention.features import WithFeatures, features_of
from dyntree_plugin.engine.attention.kernels import AttentionRows, Heads, Launch, TritonTrees
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.configuration import tree_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class TreeAttentionMetadata:
    """Metadata of a batch with trees.

    ``launch`` runs the kernel of trees. ``stock`` is the backend's metadata if a request has
    more rows than a tree, or rows of an image that see later ones: then the stock kernel runs
    first, and the kernel of trees overwrites its own rows.
    """

    launch: Launch
    stock: Any | None

    @property
    def mm_prefix_range_tensor(self) -> torch.Tensor | None:
        """The places of images. Gemma-4 sets it to None for layers of full attention."""
        found: torch.Tensor | None = getattr(self.stock, "mm_prefix_range_tensor", None)
        return found

    @mm_prefix_range_tensor.setter
    def mm_prefix_range_tensor(self, ranges: torch.Tensor | None) -> None:
        if self.stock is not None:
            self.stock.mm_prefix_range_tensor = ranges


class TreeMetadataBuilder:
    """Builds the metadata of batches with trees, and leaves all others to the stock builder.

    With `exactness` bits our kernel serves all batches of the target, whatever is in them.

    A graph of a uniform batch, in which all requests have the same number of rows, holds the
    kernel of trees only. That kernel reads its masks from this builder's buffers, and every
    `build` for such a batch fills them. It serves decodes of fewer rows, too.
    """

    takes_tree_mask = True
    fewest_rows = 2
    """The fewest rows of a request in a uniform batch without trees that their kernel runs."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        if tree_plan(vllm_config) is not None:
            return AttentionCGSupport.UNIFORM_BATCH
        stock: Any = super()
        support: AttentionCGSupport = stock.get_cudagraph_support(vllm_config, kv_cache_spec)
        return support

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> int | None:
        """Return the rows of the largest tree: kernels read on the device whose rows are whose."""
        plan, stock = tree_plan(vllm_config), cast(Any, super())
        if plan is not None:
            return plan.shape.node_budget + 1
        bound: int | None = stock.get_varlen_cudagraph_max_query_len(vllm_config, kv_cache_spec)
        return bound

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        plan = tree_plan(vllm_config)
        self.masks: MaskBuffers | None = None
        if plan is None:
            return  # An engine without trees may follow one with trees in the same process.
        columns = plan.shape.node_budget + 1
        requests = vllm_config.scheduler_config.max_num_seqs
        rows = max(vllm_config.scheduler_config.max_num_batched_tokens, requests * columns)
        self._same_bits = plan.same_bits
        if plan.same_bits:
            self.fewest_rows = 1
        # Numbers of requests and rows for which graphs were captured.
        self._captured: set[tuple[int, int]] = set()
        self.masks = MaskBuffers(requests, rows, columns, device)
        stock: Any = self
        heads = Heads(stock.num_heads_q, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size)
        made = (vllm_config.compilation_config.static_forward_context[n] for n in layer_names)
        layers = [features_of(layer) for layer in made]
        # One of each kind, for which the kernel is compiled.
        self._layers = {
            (x.window, x.both_ways, x.soft_cap, x.sinks is None, x.key_scale is None): x
            for x in layers
        }
        features = frozenset[str]().union(*(each.beyond for each in layers))
        self._kernel, self._drafting_kernel = choose_kernel(
            heads, vllm_config, kv_cache_spec, columns, device, features, plan.same_bits
        )

    def warm_up(self, kv_cache: torch.Tensor, dtype: torch.dtype, table: torch.Tensor) -> None:
        """Compile kernels; the arguments are those of `TritonTrees.warm_up`."""
        if self.masks is None:
            return
        for kernel in {self._drafting_kernel, self._kernel}:
            if isinstance(kernel, TritonTrees):
                kernel.warm_up(kv_cache, dtype, table, self.masks, self._layers.values())

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> Any:
        common, buffers = common_attn_metadata, self.masks
        if buffers is None:
            return self.build_stock(common, fast_build)
        if tree_mask is not None and tree_mask.in_place:
            rows = _rows(common, tree_mask.ctx_lens, tree_mask.ancestor_bits, common.max_query_len)
            return TreeAttentionMetadata(self._drafting_kernel.plan(rows), None)
        if self._same_bits:
            rows = _rows(common, *_filled(buffers, common, tree_mask), common.max_query_len)
            return TreeAttentionMetadata(self._kernel.plan(rows), None)
        images = _has_images(common)
        if tree_mask is None and (images or self.is_left_to_stock(common)):
            return self.build_stock(common, fast_build)
        if common.max_query_len > buffers.columns and not self._serves_any(common):
            return self.build_stock(common, fast_build)
        ctx_lens, bits = _filled(buffers, common, tree_mask, chains=not images)
        shape = common.num_reqs, common.num_actual_tokens
        of_graph = common.num_actual_tokens // common.num_reqs
        for_graph = shape in self._captured and common.max_query_len <= of_graph
        # Each number of rows may need a separate kernel; graphs compile theirs at capture.
        most = of_graph if for_graph else buffers.columns
        rows = _rows(common, ctx_lens, bits, most, for_graph)
        if common.max_query_len <= buffers.columns and not images:
            return TreeAttentionMetadata(self._kernel.plan(rows), None)
        own = self.build_stock(common, fast_build)
        return TreeAttentionMetadata(self._drafting_kernel.plan(rows), own)

    def is_left_to_stock(self, common: CommonAttentionMetadata) -> bool:
        """Return whether vLLM's kernels alone run a batch without trees."""
        return not self._is_graph_shaped(common)

    def build_stock(self, common: CommonAttentionMetadata, fast_build: bool) -> Any:
        stock: Any = super()
        return stock.build(0, common, fast_build)

    def _serves_any(self, common: CommonAttentionMetadata) -> bool:
        """Return whether any request has rows, and no more than a tree."""
        if self.masks is None:
            return False
        rows = torch.diff(common.query_start_loc_cpu)
        return bool(((rows > 0) & (rows <= self.masks.columns)).any())  # sync: host memory

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        common = common_attn_metadata
        if self._is_graph_shaped(common):
            self._captured.add((common.num_reqs, common.num_actual_tokens))
            return self.build(0, common)
        stock: Any = super()
        return stock.build_for_cudagraph_capture(common)

    def _is_graph_shaped(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a graph can serve the batch: every request has as many rows as a tree."""
        rows = common.max_query_len
        if self.masks is None or not self.fewest_rows <= rows <= self.masks.columns:
            return False
        return bool(common.num_actual_tokens == common.num_reqs * rows)


def _has_images(common: CommonAttentionMetadata) -> bool:
    """Return whether any row of a prompt is of an image whose rows see later ones, too.

    A graph serves no such batch: of a prompt it takes the last token alone.
    """
    if not common.mm_req_doc_ranges or common.is_prefilling is None:
        return False
    return bool(common.is_prefilling.any()) and requires_mm_prefix(common)  # sync: host memory


def _filled(
    buffers: MaskBuffers,
    common: CommonAttentionMetadata,
    tree_mask: TreeMask | None,
    *,
    chains: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `MaskBuffers.fill` does with the mask of a step, or with none."""
    mask: Mapping[str, Any] = {}
    if tree_mask is not None:
        mask = {
            "ctx_lens": tree_mask.ctx_lens,
            "ancestor_bits": tree_mask.ancestor_bits,
            "all_trees": not tree_mask.has_plain,
        }
    rows = common.query_start_loc, common.seq_lens, common.num_actual_tokens
    return buffers.fill(*rows, **mask, chains=chains)


def _rows(
    common: CommonAttentionMetadata,
    ctx_lens: torch.Tensor,
    bits: torch.Tensor,
    max_rows: int,
    for_graph: bool = False,
) -> AttentionRows:
    return AttentionRows(
        block_table=common.block_table_tensor,
        ctx_lens=ctx_lens,
        query_start_loc=common.query_start_loc,
        ancestor_bits=bits,
        num_rows=common.num_actual_tokens,
        max_rows=max_rows,
        query_start_loc_cpu=common.query_start_loc_cpu,
        kv_lens=common.seq_lens_cpu_upper_bound,
        for_graph=for_graph,
        seq_lens=common.seq_lens,
    )


class TreeAttentionImpl(WithFeatures):
    """Runs the kernel of trees in a stock attention layer."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scales = (output_scale, output_block_scale)
        of_layer = (layer, query, key, value, kv_cache)
        stock: Any = super()
        if not isinstance(attn_metadata, TreeAttentionMetadata):
            written: torch.Tensor = stock.forward(*of_layer, attn_metadata, output, *scales)
            return written
        if attn_metadata.stock is not None:
            stock.forward(*of_layer, attn_metadata.stock, output, *scales)
        attn_metadata.launch(query, kv_cache, output, self.features(layer))
        return output
