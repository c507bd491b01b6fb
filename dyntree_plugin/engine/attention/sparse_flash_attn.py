"""vLLM's sparse latent attention by FlashAttention 3 with trees; imports on CUDA alone."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla_sparse import FlashAttnMLASparseBackend

from dyntree_plugin.engine.attention.registration import with_trees
from dyntree_plugin.engine.attention.sparse_cuda import SparseTreeBuilder

TreeFlashAttnMLASparseBackend = with_trees(__name__, FlashAttnMLASparseBackend, SparseTreeBuilder)
