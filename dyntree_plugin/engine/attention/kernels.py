"""The kernels of tree attention on CUDA as the attention backends drive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from dyntree_plugin.engine.attention.buffers import MaskBuffers

if TYPE_CHECKING:
    from dyntree_kernels.cuda.flashinfer_attention import FlashInferTreeAttention
    from dyntree_kernels.cuda.flashinfer_variant import Variant

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""One layer: ``q`` [T, H, D], ``kv_cache`` [blocks, Hkv, N, 2 * D], ``out`` as ``q``, the scale."""


@dataclass(frozen=True)
class Heads:
    """Of one rank's layers."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a batch of R requests, as `dyntree_kernels` has them.

    Kernels read all tensors on the device and at every launch, so a captured launch serves
    whatever they then hold. ``max_rows``: no request with a tree has more. ``kv_lens`` int32 [R] on
    the host: at least the context and the columns of each request; None where nobody knows.
    ``for_graph``: a captured launch may have to serve the batch.
    """

    block_table: torch.Tensor
    ctx_lens: torch.Tensor
    query_start_loc: torch.Tensor
    ancestor_bits: torch.Tensor
    num_rows: int
    max_rows: int
    query_start_loc_cpu: torch.Tensor
    kv_lens: torch.Tensor | None
    for_graph: bool = False


class TreeKernel(Protocol):
    def plan(self, rows: AttentionRows) -> Launch:
        """Made once per step, for all layers of a group. What it returned for a batch of as many
        requests and rows before, a captured graph's launches included, serves this one too."""
        ...


class TritonTrees:
    """`dyntree_kernels.cuda.attention`, which plans nothing."""

    def __init__(self, heads: Heads, element_size: int, processors: int, one_split: bool) -> None:
        """``one_split``: the order of sums must not depend on the batch."""
        self._heads = heads
        self._element_size = element_size
        self._processors = processors
        self._one_split = one_split

    def plan(self, rows: AttentionRows) -> Launch:
        from dyntree_kernels.cuda.attention import tree_attention

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

    def warm_up(
        self, kv_cache: torch.Tensor, dtype: torch.dtype, table: torch.Tensor, rows: MaskBuffers
    ) -> None:
        """Compile what batches of any size run, on requests that do nothing.

        ``kv_cache``: a layer's. ``table`` [R, blocks]: of as many requests as there may be.
        """
        q = torch.zeros(17, self._heads.query, self._heads.size, dtype=dtype, device=table.device)
        most = table.shape[0]
        start = torch.zeros(most + 1, dtype=torch.int32, device=table.device)
        for requests in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
            begin = start[: requests + 1]
            # Triton makes another kernel where a number divides by 16.
            for count in (16, 17):
                lengths, bits = rows.fill(begin, start[:requests], count)
                nobody = AttentionRows(
                    table[:requests], lengths, begin, bits, count, rows.columns, begin, None
                )
                self.plan(nobody)(q, kv_cache, torch.empty_like(q), 1.0)

    def splits(self, requests: int, max_rows: int) -> int:
        """Programs that share a tile: a power of two, as each number is a kernel to compile."""
        from dyntree_kernels.cuda.attention import tiling

        if self._one_split:
            return 1
        packed = max_rows * self._heads.query // self._heads.kv
        tile = tiling(self._heads.size, packed, self._element_size)
        programs = -(-packed // tile.block_m) * self._heads.kv * requests
        wanted = min(32, max(1, 2 * self._processors // programs))
        return 1 << (wanted.bit_length() - 1)


class FlashInferTrees:
    """`dyntree_kernels.cuda.flashinfer_attention`: one plan per step, one more per graph captured.

    It serves batches of trees alone.
    """

    def __init__(
        self,
        variant: Variant,
        heads: Heads,
        block_size: int,
        max_len: int,
        device: torch.device,
        *,
        processors: int,
        graphs: tuple[int, int],
    ) -> None:
        """``variant``: a module that is built. ``max_len``: positions of the longest request.
        ``graphs``: the most requests and rows of a batch that a CUDA graph serves."""
        from dyntree_kernels.cuda.flashinfer_attention import workspace_bytes

        self._variant = variant
        self._heads = heads
        self._block_size = block_size
        self._max_len = max_len
        self._device = device
        # Plans run one after the other, so that they can share it.
        size = workspace_bytes(heads.query, heads.kv, heads.size, processors, *graphs)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self._by_shape: dict[tuple[int, int] | None, FlashInferTreeAttention] = {}
        # That of graphs come when these are captured, before requests as well.
        self._attention(None)

    def plan(self, rows: AttentionRows) -> Launch:
        if rows.kv_lens is None:
            raise RuntimeError("vLLM has not said how long the requests may be")
        requests = len(rows.ctx_lens)
        attention = self._attention((requests, rows.num_rows) if rows.for_graph else None)
        # With drafts in flight the host's bound may lie beyond what a request can have.
        kv_lens = rows.kv_lens[:requests].clamp(max=self._max_len)
        attention.plan(rows.query_start_loc_cpu, kv_lens, rows.block_table)
        count, page = rows.num_rows, self._block_size

        def launch(
            q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, scale: float
        ) -> None:
            if kv_cache.shape[2] != page:
                raise RuntimeError(f"planned for blocks of {page}, got {tuple(kv_cache.shape)}")
            attention.run(
                q[:count], kv_cache, rows.ctx_lens, rows.ancestor_bits, out[:count], scale
            )

        return launch

    def _attention(self, shape: tuple[int, int] | None) -> FlashInferTreeAttention:
        """With buffers that stay in place for the graph of so many requests and rows."""
        from dyntree_kernels.cuda.flashinfer_attention import FlashInferTreeAttention

        blocks = -(-self._max_len // self._block_size)
        requests, rows = shape or (None, None)
        if shape not in self._by_shape:
            self._by_shape[shape] = FlashInferTreeAttention(
                self._variant,
                self._heads.query,
                self._heads.kv,
                self._block_size,
                self._device,
                max_requests=requests,
                max_rows=rows,
                max_blocks=None if requests is None else requests * blocks,
                workspace=self._workspace,
            )
        return self._by_shape[shape]
