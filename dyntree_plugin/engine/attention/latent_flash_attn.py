"""vLLM's latent attention by FlashAttention 3 with trees: its module imports on CUDA alone."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend

from dyntree_plugin.engine.attention.latent_cuda import LatentTritonBuilder
from dyntree_plugin.engine.attention.latent_layers import LatentTreeImpl
from dyntree_plugin.engine.attention.registration import with_trees

TreeFlashAttnMLABackend = with_trees(
    __name__, FlashAttnMLABackend, LatentTritonBuilder, LatentTreeImpl
)
