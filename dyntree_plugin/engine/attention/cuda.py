"""vLLM's attention backends on CUDA that carry trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVBackend

from dyntree_plugin.engine.attention.cuda_layers import TreeAttentionImpl, TreeMetadataBuilder
from dyntree_plugin.engine.attention.registration import with_trees
from dyntree_plugin.engine.layer_kinds import Move

TreeFlashAttentionBackend = with_trees(
    __name__, FlashAttentionBackend, TreeMetadataBuilder, TreeAttentionImpl
)
TreeTritonAttentionBackend = with_trees(
    __name__, TritonAttentionBackend, TreeMetadataBuilder, TreeAttentionImpl
)


def _of_two_sizes(stock: Any) -> Any:
    """Do as `with_trees` for a backend of keys and values of different sizes.

    vLLM's layers and builders read the size of values from the stock class, which a model would set
    in the subclass.
    """
    made = with_trees(__name__, stock, TreeMetadataBuilder, TreeAttentionImpl)
    made.set_head_size_v = staticmethod(stock.set_head_size_v)
    return made


TreeFlashAttentionDiffKVBackend = _of_two_sizes(FlashAttentionDiffKVBackend)
TreeTritonAttentionDiffKVBackend = _of_two_sizes(TritonAttentionDiffKVBackend)


def kv_mover(layers: Sequence[Any]) -> Move:
    """Make the `Move` of layers of one shape."""
    from dyntree_kernels.cuda.kv_move import KVMover

    return KVMover([layer.kv_cache for layer in layers])
