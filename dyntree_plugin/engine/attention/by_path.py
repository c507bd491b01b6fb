"""Attention in the order of positions, for `exactness` bits on CUDA."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dyntree_plugin.engine.attention.features import element_type
from dyntree_plugin.engine.attention.kernels import (
    AttentionRows,
    LatentTrees,
    Launch,
    TritonTrees,
)

if TYPE_CHECKING:
    import torch

    from dyntree_kernels.features import LayerFeatures


def _by_path(rows: AttentionRows) -> Launch:
    """Plan a step of `dyntree_kernels.cuda.path_attention` for all rows, of trees and others."""
    from dyntree_kernels.cuda.path_attention import PathColumns, path_attention

    if rows.seq_lens is None:
        raise RuntimeError("rows without a tree have no positions")
    lengths, count = rows.seq_lens, rows.num_rows
    # The first layer reads them, in a graph, too: vLLM captures with metadata of its own.
    paths = functools.cache(lambda: PathColumns.of(rows.ancestor_bits[:count]))

    def launch(
        q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
    ) -> None:
        path_attention(
            q[:count],
            kv_cache.view(element_type(kv_cache.dtype)),
            rows.block_table,
            rows.ctx_lens,
            rows.query_start_loc,
            paths(),
            out[:count],
            features,
            seq_lens=lengths,
            max_rows=rows.max_rows,
        )

    return launch


class PathTrees(TritonTrees):
    """Runs attention in the order of positions for all rows, of trees and others."""

    plan = staticmethod(_by_path)


class LatentPathTrees(LatentTrees):
    """As `PathTrees`, with latent vectors."""

    def plan(self, rows: AttentionRows) -> Launch:
        launch = _by_path(rows)
        return lambda q, cache, *of_layer: launch(q, cache[:, None], *of_layer)
