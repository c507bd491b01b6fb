"""vLLM's latent attention by FlashAttention 3 with trees: its module imports on CUDA alone."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

from dyntree_plugin.engine.attention.latent_cuda import LatentTritonBuilder
from dyntree_plugin.engine.attention.latent_layers import LatentTreeImpl


class TreeFlashAttnMLAMetadataBuilder(LatentTritonBuilder, FlashAttnMLAMetadataBuilder):
    pass


class TreeFlashAttnMLAImpl(LatentTreeImpl, FlashAttnMLAImpl):  # type: ignore[misc]
    pass


class TreeFlashAttnMLABackend(FlashAttnMLABackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttnMLAImpl]:
        return TreeFlashAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttnMLAMetadataBuilder]:
        return TreeFlashAttnMLAMetadataBuilder
