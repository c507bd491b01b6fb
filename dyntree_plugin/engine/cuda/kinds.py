"""The kinds of layers that trees pass on CUDA."""

from __future__ import annotations

from dyntree_plugin.engine.attention.indexer import IndexerKind
from dyntree_plugin.engine.attention.kind import AttentionKind
from dyntree_plugin.engine.attention.latent import LatentKind
from dyntree_plugin.engine.layer_kinds import LayerKind
from dyntree_plugin.engine.states.kind import StateKind

_ATTENTION = "dyntree_plugin.engine.attention"
_SPARSE = f"{_ATTENTION}.sparse"
_STATES = "dyntree_plugin.engine.states.cuda_layers"

KINDS: tuple[LayerKind, ...] = (
    AttentionKind(
        "cuda",
        {
            "FLASH_ATTN": f"{_ATTENTION}.cuda.TreeFlashAttentionBackend",
            "FLASHINFER": f"{_ATTENTION}.cuda_flashinfer.TreeFlashInferBackend",
            "TRITON_ATTN": f"{_ATTENTION}.cuda.TreeTritonAttentionBackend",
            "FLASH_ATTN_DIFFKV": f"{_ATTENTION}.cuda.TreeFlashAttentionDiffKVBackend",
            "TRITON_ATTN_DIFFKV": f"{_ATTENTION}.cuda.TreeTritonAttentionDiffKVBackend",
        },
        f"{_ATTENTION}.cuda.kv_mover",
    ),
    LatentKind(
        "cuda",
        {
            "TRITON_MLA": f"{_ATTENTION}.latent_cuda.TreeTritonMLABackend",
            "FLASHMLA": f"{_ATTENTION}.latent_cuda.TreeFlashMLABackend",
            "FLASH_ATTN_MLA": f"{_ATTENTION}.latent_flash_attn.TreeFlashAttnMLABackend",
            "FLASHMLA_SPARSE": f"{_SPARSE}_cuda.TreeFlashMLASparseBackend",
            "FLASH_ATTN_MLA_SPARSE": f"{_SPARSE}_flash_attn.TreeFlashAttnMLASparseBackend",
            "FLASHINFER_MLA_SPARSE": f"{_SPARSE}_cuda.TreeFlashInferMLASparseTRTLLMBackend",
        },
        f"{_ATTENTION}.latent_cuda.latent_mover",
    ),
    IndexerKind("cuda", {}, f"{_SPARSE}_cuda.index_mover"),
    StateKind(
        {
            "MambaMixer2": f"{_STATES}.TreeMambaMixer2",
            "ShortConv": f"{_STATES}.TreeShortConv",
            "QwenGatedDeltaNetAttention": f"{_STATES}.TreeGatedDeltaNet",
            "BailingMoeV3KimiDeltaAttention": f"{_STATES}.TreeKimiDelta",
        },
    ),
)
