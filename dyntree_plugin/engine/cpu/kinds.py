"""The kinds of layers that trees pass on a CPU."""

from __future__ import annotations

from dyntree_plugin.engine.attention.kind import AttentionKind
from dyntree_plugin.engine.attention.latent import LatentKind
from dyntree_plugin.engine.layer_kinds import LayerKind
from dyntree_plugin.engine.states.kind import StateKind

_ATTENTION = "dyntree_plugin.engine.attention"
_STATES = "dyntree_plugin.engine.states"

KINDS: tuple[LayerKind, ...] = (
    AttentionKind(
        "cpu",
        {"CPU_ATTN": f"{_ATTENTION}.cpu.TreeCPUAttentionBackend"},
        f"{_ATTENTION}.cpu.kv_mover",
    ),
    LatentKind(
        "cpu",
        {"CPU_MLA": f"{_ATTENTION}.latent_cpu.TreeCPUMLABackend"},
        f"{_ATTENTION}.latent_cpu.latent_mover",
    ),
    StateKind(
        {
            "MambaMixer2": f"{_STATES}.layers.TreeMambaMixer2",
            "ShortConv": f"{_STATES}.layers.TreeShortConv",
            "QwenGatedDeltaNetAttention": f"{_STATES}.layers.TreeGatedDeltaNet",
        },
    ),
)
