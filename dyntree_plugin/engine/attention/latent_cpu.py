"""vLLM's latent attention on a CPU with trees.

With `exactness` bits our kernel serves all rows, those of prompts too, and each head has products
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from dyntree_kernels.cpu.latent_attention import LatentTreeAttention
from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention.chains import with_chains
from dyntree_plugin.engine.attention.cpu import PathMover
from dyntree_plugin.engine.attention.kernels import AttentionRows
from dyntree_plugin.engine.attention.latent_layers import (
    LatentTreeBuilder,
    LatentTreeImpl,
    TreeLatentMetadata,
    of_batch,
)
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.attention.registration import with_trees
from dyntree_plugin.engine.rounding import truncates_bfloat16
from dyntree_plugin.engine.row_bits import Product


class LatentNumbaBuilder(LatentTreeBuilder):
    """Precedes a builder of metadata on a CPU."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree_mask: TreeMask | None = None,
    ) -> Any:
        common = common_attn_metadata
        if tree_mask is None or not tree_mask.same_bits:
            return super().build(common_prefix_len, common, fast_build, tree_mask)
        table, starts = common.block_table_tensor, common.query_start_loc
        rows = with_chains(tree_mask, table, starts, common.seq_lens)
        return TreeLatentMetadata(
            **of_batch(common),
            num_decodes=0,
            num_decode_tokens=0,
            num_prefills=common.num_reqs,
            attend=LatentTreeAttention(*rows, truncate=truncates_bfloat16(), by_path=True),
        )

    def attend(self, rows: AttentionRows) -> LatentTreeAttention:
        return LatentTreeAttention(
            rows.block_table,
            rows.ctx_lens,
            rows.query_start_loc,
            rows.ancestor_bits,
            truncate=truncates_bfloat16(),
        )


class LatentNumbaImpl(LatentTreeImpl):
    """Precedes a layer on a CPU.

    ``product_of`` returns the product with a weight [N, K] that gives rows the same bits in any
    batch.
    """

    product_of: ClassVar[Callable[[torch.Tensor], Product]]
    qk_nope_head_dim: int
    kv_b_proj: Any
    scale: float
    _products: Sequence[tuple[Product, Product]] = ()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        stock: Any = super()
        stock.process_weights_after_loading(act_dtype)
        self._products = ()

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        output: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        trees, cache = attn_metadata, kv_c_and_k_pe_cache
        if trees.prefill is not None:
            stock: Any = super()
            stock.forward_mha(q, kv_c_normed, k_pe, cache, trees, *args, output=output, **kwargs)
            return
        size, weight, (rows, heads, _) = self.kv_lora_rank, self.kv_b_proj.weight, q.shape
        nope, rotated = q[..., : self.qk_nope_head_dim], q[..., self.qk_nope_head_dim :]
        self._products = products = self._products or self._of_heads(heads)
        queries = q.new_empty(rows, heads, size + rotated.shape[-1])
        queries[..., size:] = rotated
        for head, (of_queries, _) in enumerate(products):
            queries[:, head, :size] = of_queries(nope[:, head], weight, None)
        found = q.new_empty(rows, heads, size)
        trees.attend(queries, cache, found, LayerFeatures(scale=self.scale))
        out = output.view(rows, heads, -1)
        for head, (_, of_values) in enumerate(products):
            out[:, head] = of_values(found[:, head], weight, None)

    def _of_heads(self, heads: int) -> Sequence[tuple[Product, Product]]:
        """Return the products that bring queries into the space of latent vectors, and values out
        of it."""
        weights = self.kv_b_proj.weight.view(heads, -1, self.kv_lora_rank)
        parts = ((each[: self.qk_nope_head_dim], each[self.qk_nope_head_dim :]) for each in weights)
        of = type(self).product_of
        return [(of(keys.t().contiguous()), of(values.contiguous())) for keys, values in parts]


TreeCPUMLABackend = with_trees(__name__, CPUMLABackend, LatentNumbaBuilder, LatentNumbaImpl)


def latent_mover(layers: Sequence[Any]) -> PathMover:
    """Make the `Move` of layers of one shape."""
    caches = [layer.kv_cache.view(-1, layer.head_size) for layer in layers]

    def move(source: torch.Tensor, target: torch.Tensor) -> None:
        moved = (source >= 0) & (target >= 0)
        sources, targets = source[moved], target[moved]  # sync: host memory
        for cache in caches:
            cache[targets] = cache[sources]

    return PathMover(move)
