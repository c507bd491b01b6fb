"""vLLM's attention backends on CUDA that carry trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from dyntree_plugin.engine.attention.cuda_layers import TreeAttentionImpl, TreeMetadataBuilder
from dyntree_plugin.engine.layer_kinds import Move


class TreeFlashAttentionMetadataBuilder(  # type: ignore[misc]
    TreeMetadataBuilder, FlashAttentionMetadataBuilder
):
    pass


class TreeFlashAttentionImpl(TreeAttentionImpl, FlashAttentionImpl):  # type: ignore[misc]
    pass


class TreeFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        return TreeFlashAttentionMetadataBuilder


class TreeTritonAttentionMetadataBuilder(  # type: ignore[misc]
    TreeMetadataBuilder, TritonAttentionMetadataBuilder
):
    pass


class TreeTritonAttentionImpl(TreeAttentionImpl, TritonAttentionImpl):  # type: ignore[misc]
    pass


class TreeTritonAttentionBackend(TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonAttentionMetadataBuilder]:
        return TreeTritonAttentionMetadataBuilder


def kv_mover(layers: Sequence[Any]) -> Move:
    """Make the `Move` of layers of one shape."""
    from dyntree_kernels.cuda.kv_move import KVMover

    return KVMover([layer.kv_cache for layer in layers])
