"""The kernels of tree attention on CUDA as the attention backends drive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""One layer: ``q`` [T, H, D], ``kv_cache`` [blocks, Hkv, N, 2 * D], ``out`` as ``q``, the scale."""


@dataclass(frozen=True)
class Heads:
    """Of one rank's layers."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True)
class TreeRows:
    """The rows of a batch of R requests, as `dyntree_kernels` has them.

    Kernels read all tensors on the device and at every launch, so a captured launch serves
    whatever they then hold. ``max_rows``: no request with a tree has more. ``kv_lens`` int32 [R] on
    the host: at least the context and the columns of each request; None where nobody knows.
    """

    block_table: torch.Tensor
    ctx_lens: torch.Tensor
    query_start_loc: torch.Tensor
    ancestor_bits: torch.Tensor
    num_rows: int
    max_rows: int
    query_start_loc_cpu: torch.Tensor
    kv_lens: torch.Tensor | None


class TreeKernel(Protocol):
    def plan(self, rows: TreeRows) -> Launch:
        """Made once per step, for all layers of a group. What it returned for a batch of as many
        requests and rows before, a captured graph's launches included, serves this one too."""
        ...


class TritonTrees:
    """`dyntree_kernels.gpu.attention`, which plans nothing."""

    def __init__(self, heads: Heads, element_size: int, processors: int, one_split: bool) -> None:
        """``one_split``: the order of sums must not depend on the batch."""
        self._heads = heads
        self._element_size = element_size
        self._processors = processors
        self._one_split = one_split

    def plan(self, rows: TreeRows) -> Launch:
        from dyntree_kernels.gpu.attention import tree_attention

        splits = self.splits(len(rows.ctx_lens), rows.max_rows)
        count = rows.num_rows

        def launch(
            q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, scale: float
        ) -> None:
            tree_attention(
                q[:count],
                kv_cache,
                rows.block_table,
                rows.ctx_lens,
                rows.query_start_loc,
                rows.ancestor_bits,
                out[:count],
                scale,
                max_rows=rows.max_rows,
                splits=splits,
            )

        return launch

    def splits(self, requests: int, max_rows: int) -> int:
        """Programs that share a tile: a power of two, as each number is a kernel to compile."""
        from dyntree_kernels.gpu.attention import tiling

        if self._one_split:
            return 1
        packed = max_rows * self._heads.query // self._heads.kv
        tile = tiling(self._heads.size, packed, self._element_size)
        programs = -(-packed // tile.block_m) * self._heads.kv * requests
        wanted = min(32, max(1, 2 * self._processors // programs))
        return 1 << (wanted.bit_length() - 1)
