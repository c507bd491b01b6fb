"""vLLM's attention backends on CUDA that carry trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from dyntree_plugin.engine.attention.cuda_layers import TreeAttentionImpl, TreeMetadataBuilder
from dyntree_plugin.engine.attention.registration import with_trees
from dyntree_plugin.engine.layer_kinds import Move

TreeFlashAttentionBackend = with_trees(
    __name__, FlashAttentionBackend, TreeMetadataBuilder, TreeAttentionImpl
)
TreeTritonAttentionBackend = with_trees(
    __name__, TritonAttentionBackend, TreeMetadataBuilder, TreeAttentionImpl
)


def kv_mover(layers: Sequence[Any]) -> Move:
    """Make the `Move` of layers of one shape."""
    from dyntree_kernels.cuda.kv_move import KVMover

    return KVMover([layer.kv_cache for layer in layers])
