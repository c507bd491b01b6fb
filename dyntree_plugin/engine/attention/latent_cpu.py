"""vLLM's latent attention on a CPU with trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from dyntree_kernels.cpu.latent_attention import LatentTreeAttention
from dyntree_plugin.engine.attention.cpu import PathMover
from dyntree_plugin.engine.attention.kernels import AttentionRows
from dyntree_plugin.engine.attention.latent_layers import (
    LatentTreeBuilder,
    LatentTreeImpl,
)
from dyntree_plugin.engine.attention.registration import with_trees
from dyntree_plugin.engine.rounding import truncates_bfloat16


class LatentNumbaBuilder(LatentTreeBuilder):
    """Precedes a builder of metadata on a CPU."""

    def attend(self, rows: AttentionRows) -> LatentTreeAttention:
        return LatentTreeAttention(
            rows.block_table,
            rows.ctx_lens,
            rows.query_start_loc,
            rows.ancestor_bits,
            truncate=truncates_bfloat16(),
        )


TreeCPUMLABackend = with_trees(__name__, CPUMLABackend, LatentNumbaBuilder, LatentTreeImpl)


def latent_mover(layers: Sequence[Any]) -> PathMover:
    """Make the `Move` of layers of one shape."""
    caches = [layer.kv_cache.view(-1, layer.head_size) for layer in layers]

    def move(source: torch.Tensor, target: torch.Tensor) -> None:
        moved = (source >= 0) & (target >= 0)
        sources, targets = source[moved], target[moved]  # sync: host memory
        for cache in caches:
            cache[targets] = cache[sources]

    return PathMover(move)
