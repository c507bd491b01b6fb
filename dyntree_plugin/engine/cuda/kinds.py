"""The kinds of layers that trees pass on CUDA."""

from __future__ import annotations

from dyntree_plugin.engine.attention.kind import AttentionKind
from dyntree_plugin.engine.layer_kinds import LayerKind

_ATTENTION = "dyntree_plugin.engine.attention.cuda"

KINDS: tuple[LayerKind, ...] = (
    AttentionKind(
        "cuda",
        {
            "FLASH_ATTN": f"{_ATTENTION}.TreeFlashAttentionBackend",
            "TRITON_ATTN": f"{_ATTENTION}.TreeTritonAttentionBackend",
        },
        f"{_ATTENTION}.kv_mover",
    ),
)
