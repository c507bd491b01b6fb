"""Run the kernels of tree attention on CUDA for the attention backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.features import element_type

if TYPE_CHECKING:
    from dyntree_kernels.cuda.cascade import Cascade, Contexts
    from dyntree_kernels.cuda.flashinfer_attention import FlashInferTreeAttention
    from dyntree_kernels.cuda.flashinfer_variant import Variant
    from dyntree_kernels.cuda.xqa import XqaTreeAttention

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LayerFeatures], None]
"""Runs a layer on ``q`` [T, H, D], ``kv_cache`` [blocks, Hkv, N, 2 * D], ``out`` and the layer's
features."""


@dataclass(frozen=True)
class Heads:
    """Number of query heads and KV heads of one rank's layers, and the head size."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a batch of R requests, as in `dyntree_kernels`.

    Kernels read all tensors on the device at every launch, so a captured launch serves their
    current contents. ``max_rows`` is the largest number of rows of a request with a tree.
    ``kv_lens`` int32 [R] on the host are upper bounds of context and columns of each request; None
    if they are unknown. ``for_graph``: whether a captured launch may serve the batch. ``seq_lens``
    int32 [R]: the positions of each request with its rows, which are the last ones; None in drafts.
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
    seq_lens: torch.Tensor | None = None


class TreeKernel(Protocol):
    def plan(self, rows: AttentionRows) -> Launch:
        """Plan one step for all layers of a group.

        Earlier launches for as many requests and rows serve this batch too, in captured graphs as
        well.
        """
        ...


class TritonTrees:
    """Runs `dyntree_kernels.cuda.attention`, which needs no plan."""

    def __init__(self, heads: Heads, element_size: int, processors: int, one_split: bool) -> None:
        """``one_split``: sum in an order that does not depend on the batch."""
        self._heads = heads
        self._element_size = element_size
        self._processors = processors
        self._one_split = one_split

    def plan(self, rows: AttentionRows) -> Launch:
        from dyntree_kernels.cuda.attention import tree_attention

        count, columns = rows.num_rows, 32 * rows.ancestor_bits.shape[1]
        splits = functools.cache(
            lambda window: self.splits(len(rows.ctx_lens), rows.max_rows, window, columns)
        )

        def launch(
            q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
        ) -> None:
            tree_attention(
                q[:count],
                kv_cache.view(element_type(kv_cache.dtype)),
                rows.block_table,
                rows.ctx_lens,
                rows.query_start_loc,
                rows.ancestor_bits,
                out[:count],
                features,
                max_rows=rows.max_rows,
                splits=splits(features.window),
            )

        return launch

    def warm_up(
        self,
        kv_cache: torch.Tensor,
        dtype: torch.dtype,
        table: torch.Tensor,
        rows: MaskBuffers,
        layers: Iterable[LayerFeatures],
    ) -> None:
        """Compile the kernels for batches of any size and ``layers``, on requests without rows.

        ``kv_cache`` is that of one layer. ``table`` [R, blocks] is the block table of the largest
        batch.
        """
        heads, size, device = self._heads.query, self._heads.size, table.device
        q = torch.zeros(17, heads, size, dtype=dtype, device=device)
        for nobody in _without_rows(table, rows):
            launch = self.plan(nobody)
            for features in layers:
                quantised = features.query_scale is not None
                given = q.to(element_type(kv_cache.dtype)) if quantised else q
                out = q.new_empty(17, heads, features.value_size or size)
                launch(given, kv_cache, out, features)

    def splits(
        self, requests: int, max_rows: int, window: int | None = None, columns: int = 0
    ) -> int:
        """Return how many programs share a tile.

        Behind a ``window`` there are no more tiles than it and ``columns`` of the tree have.
        """
        from dyntree_kernels.cuda.attention import tiling

        if self._one_split:
            return 1
        packed = max_rows * self._heads.query // self._heads.kv
        tile = tiling(self._heads.size, packed, self._element_size)
        programs = -(-packed // tile.block_m) * self._heads.kv * requests
        most = 32 if window is None else 1 + (window + columns) // tile.block_n
        return _splits(programs, self._processors, most)


class LatentTrees:
    """Runs `dyntree_kernels.cuda.latent_attention`, which needs no plan."""

    def __init__(
        self, heads: int, values: int, element_size: int, processors: int, one_split: bool
    ) -> None:
        """``values``: elements of a cached vector that are values. ``one_split``: as in
        `TritonTrees`."""
        self._heads = heads
        self._values = values
        self._element_size = element_size
        self._processors = processors
        self._one_split = one_split

    def plan(self, rows: AttentionRows) -> Launch:
        """Plan one step for all layers of a group, for `latent_layers.Attend`."""
        from dyntree_kernels.cuda.latent_attention import latent_tiling, latent_tree_attention

        packed = rows.max_rows * self._heads
        row_tiles = -(-packed // latent_tiling(packed, self._element_size).block_m)
        splits = 1
        if not self._one_split:
            splits = _splits(row_tiles * max(1, len(rows.ctx_lens)), self._processors)

        def launch(
            q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
        ) -> None:
            latent_tree_attention(
                q,
                cache.view(element_type(cache.dtype)),
                rows.block_table,
                rows.ctx_lens,
                rows.query_start_loc,
                rows.ancestor_bits,
                out,
                features,
                max_rows=rows.max_rows,
                splits=splits,
            )

        return launch

    def warm_up(
        self,
        cache: torch.Tensor,
        dtype: torch.dtype,
        table: torch.Tensor,
        rows: MaskBuffers,
        features: LayerFeatures,
    ) -> None:
        """Compile the kernel for batches of any size; the arguments are as in `TritonTrees`."""
        out = torch.zeros(17, self._heads, self._values, dtype=dtype, device=table.device)
        given = dtype if features.query_scale is None else element_type(cache.dtype)
        q = torch.zeros(17, self._heads, cache.shape[-1], dtype=given, device=table.device)
        for nobody in _without_rows(table, rows):
            self.plan(nobody)(q[: nobody.num_rows], cache, out[: nobody.num_rows], features)


def _splits(programs: int, processors: int, most: int = 32) -> int:
    """Return how many programs share a tile: a power of two, since each number is a kernel."""
    wanted = min(32, max(1, 2 * processors // programs), most)
    return 1 << (wanted.bit_length() - 1)


def _without_rows(table: torch.Tensor, rows: MaskBuffers) -> Iterator[AttentionRows]:
    """Yield batches of requests without rows, such that a kernel is compiled for any batch.

    ``table`` [R, blocks] is the block table of the largest batch.
    """
    most = table.shape[0]
    start = torch.zeros(most + 1, dtype=torch.int32, device=table.device)
    for requests in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
        begin = start[: requests + 1]
        # Triton compiles another kernel for numbers that are multiples of 16.
        for count in (16, 17):
            nothing = start[:requests]
            lengths, bits = rows.fill(begin, nothing, count)
            of_batch = table[:requests], lengths, begin, bits, count, rows.columns, begin, None
            yield AttentionRows(*of_batch, seq_lens=nothing)


class XqaTrees:
    """Runs `dyntree_kernels.cuda.xqa`, which needs no plan. It serves batches of trees only."""

    def __init__(self, attention: XqaTreeAttention) -> None:
        self._attention = attention

    def plan(self, rows: AttentionRows) -> Launch:
        if rows.seq_lens is None:
            raise RuntimeError("XQA serves no drafts")
        lengths, count = rows.seq_lens, rows.num_rows

        def launch(
            q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
        ) -> None:
            self._attention.run(
                q[:count],
                kv_cache,
                rows.block_table,
                lengths,
                rows.query_start_loc,
                rows.ancestor_bits,
                out[:count],
                features,
                rows.max_rows,
            )

        return launch


class CascadeTrees(TritonTrees):
    """Runs `dyntree_kernels.cuda.cascade` for batches of trees of sizes that it pays for, and
    Triton's kernel alone for others. Neither needs a plan."""

    def __init__(self, cascade: Cascade, pays: Callable[[int], bool], *of_triton: Any) -> None:
        """``pays``: whether the cascade serves requests of at most so many rows. ``of_triton``:
        arguments of `TritonTrees`."""
        super().__init__(*of_triton)
        self._cascade = cascade
        self._pays = functools.cache(pays)

    def plan(self, rows: AttentionRows) -> Launch:
        if not self._pays(rows.max_rows):
            return super().plan(rows)
        cascade, count = self._cascade, rows.num_rows
        batch = rows.block_table, rows.ctx_lens, rows.query_start_loc
        first: LayerFeatures | None = None
        contexts: Contexts | None = None

        def launch(
            q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
        ) -> None:
            nonlocal first, contexts
            q, out = q[:count], out[:count]
            # The first layer's turn comes once in each forward, and so in each graph of one.
            first = first or features
            if contexts is None or features is first:
                contexts = cascade.contexts(q, kv_cache, *batch, rows.max_rows)
            cascade.run(
                *(contexts, q, kv_cache, *batch, rows.ancestor_bits, out, features, rows.max_rows)
            )

        return launch


class FlashInferTrees:
    """Runs `dyntree_kernels.cuda.flashinfer_attention`, with one plan per step and per graph.

    It serves batches of trees only.
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
        # With drafts in flight the host's bound may exceed the longest request.
        kv_lens = rows.kv_lens[:requests].clamp(max=self._max_len)
        attention.plan(rows.query_start_loc_cpu, kv_lens, rows.block_table)
        count, page = rows.num_rows, self._block_size

        def launch(
            q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, features: LayerFeatures
        ) -> None:
            if kv_cache.shape[2] != page:
                raise RuntimeError(f"planned for blocks of {page}, got {tuple(kv_cache.shape)}")
            attention.run(
                q[:count], kv_cache, rows.ctx_lens, rows.ancestor_bits, out[:count], features
            )

        return launch

    def _attention(self, shape: tuple[int, int] | None) -> FlashInferTreeAttention:
        """Return the instance for the graph of ``shape`` (requests, rows), or for eager steps.

        Its buffers stay in place.
        """
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
