"""The kinds of layers that trees pass on a CPU."""

from __future__ import annotations

from dyntree_plugin.engine.attention.kind import AttentionKind
from dyntree_plugin.engine.layer_kinds import LayerKind

_ATTENTION = "dyntree_plugin.engine.attention.cpu"

KINDS: tuple[LayerKind, ...] = (
    AttentionKind(
        "cpu", {"CPU_ATTN": f"{_ATTENTION}.TreeCPUAttentionBackend"}, f"{_ATTENTION}.kv_mover"
    ),
)
