"""Drafting on CUDA: a few graphs per step, of as many draft forwards as the scheduler says.

vLLM runs its own draft models without graphs. Here nothing needs the host but how many forwards
there are, so the catch-up, what follows it, every forward and the finished tree are a graph each,
one per number of requests. What passes from one to the next lies at addresses that never change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger

from dyntree_kernels.growth import StepGrowth
from dyntree_plugin.engine.configuration import node_buckets, trees_are_cut
from dyntree_plugin.engine.cuda.capture import recorder
from dyntree_plugin.engine.cuda.graphs import Input, Record, RequestGraphs, Tensors, request_sizes
from dyntree_plugin.engine.step.compiled_growth import CompiledTreeSpeculator
from dyntree_plugin.engine.step.forwards import Emitted, Roots
from dyntree_plugin.engine.step.requests import COLUMNS, PADDING

logger = init_logger("vllm.dyntree")

MOST_REQUESTS = 128
"""Of a captured batch."""


class GraphedTreeSpeculator(CompiledTreeSpeculator):
    """Replays graphs wherever the batch is not too large, unless the engine is to be eager."""

    # By the most tokens that a request can have got.
    _catching_up: dict[int, RequestGraphs] | None = None
    # The roots' children, and every forward with its children; a graph of all growth where it is
    # not compiled.
    _growing: Sequence[RequestGraphs] = ()
    # The tree behind so many forwards; none where all growth is one graph.
    _finishing: Sequence[RequestGraphs] = ()

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make room for inputs; vLLM calls it whenever there is a new KV cache."""
        self._catching_up, self._growing, self._finishing = None, (), ()
        if cudagraph_mode == CUDAGraphMode.NONE:
            return
        sizes = request_sizes(min(self.max_num_reqs, MOST_REQUESTS))
        if sizes[-1] < self.max_num_reqs:
            logger.info("Batches of more than %d requests draft without CUDA graphs.", sizes[-1])

        def zeros(*shape: int, dtype: torch.dtype, padding: int | None = None) -> Input:
            return Input(torch.zeros(sizes[-1], *shape, dtype=dtype, device=self.device), padding)

        dtype: Any = self.dtype  # vLLM has resolved its name by now
        packed = zeros(COLUMNS, dtype=torch.int64, padding=PADDING)
        positions, counts = zeros(dtype=torch.int64), zeros(dtype=torch.int32)
        tokens = zeros(self.shape.max_depth + 1, dtype=torch.int64)
        self._hidden_of_roots = zeros(self.hidden_size, dtype=dtype)
        roots = [self._hidden_of_roots, Input(self._root_positions[: sizes[-1]])]

        def graphs(function: Callable[..., Tensors], *inputs: Input) -> RequestGraphs:
            return RequestGraphs(function, [packed, *inputs], sizes)

        self._catching_up = {
            most: graphs(self._run_captured, positions, Input(tokens.buffer[:, :most]), counts)
            for most in self._numbers_emitted()
        }
        growth, forwards = self._compiled, len(self.growing.widths)
        if growth is None:
            self._growing = [graphs(self._grow_captured, *roots)]
            return
        steps = [partial(self._forward_captured, growth, f) for f in range(1, 1 + forwards)]
        start = graphs(partial(self._start_captured, growth), *roots)
        self._growing = [start, *map(graphs, steps)]
        ends = [partial(self._finish_captured, growth, f) for f in range(1 + forwards)]
        self._finishing = list(map(graphs, ends))

    def _numbers_emitted(self) -> list[int]:
        """The most tokens that a request can get of trees of every size that there is."""
        shape = self.shape
        sizes = [shape.node_budget]
        if trees_are_cut(self.vllm_config):
            sizes = [*node_buckets(shape.node_budget)]
        return sorted({1 + min(size, shape.max_depth) for size in sizes})

    @property
    def has_graphs(self) -> bool:
        return self._catching_up is not None

    @property
    def fewest_forwards(self) -> int:
        return 0 if self._finishing or not self._growing else len(self.growing.widths)

    def capture(self) -> None:
        if self.has_graphs:
            with graph_capture(device=self.device):
                self.capture_drafting(recorder(self.vllm_config))

    def capture_drafting(self, record: Record) -> None:
        catching_up = self._catching_up or {}
        for graphs in (*catching_up.values(), *self._growing, *self._finishing):
            graphs.capture(record)

    def _run_captured(self, packed: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        roots, tokens, counts = tensors
        emitted = Emitted(roots, tokens, counts, most=tokens.shape[1])
        chain = self._chain(self._unpacked(packed), emitted)
        own = self._hidden_of_roots.buffer[: len(packed)]
        torch.index_select(self._hidden(chain.rows), 0, chain.last, out=own)
        return ()

    def _grow_captured(self, packed: torch.Tensor, *roots: torch.Tensor) -> Tensors:
        return (super()._grow_behind(packed, Roots(*roots), greedy=False),)

    def _start_captured(
        self, growth: StepGrowth, packed: torch.Tensor, *roots: torch.Tensor
    ) -> Tensors:
        self._start(growth, self._unpacked(packed), Roots(*roots))
        return ()

    def _forward_captured(self, growth: StepGrowth, forward: int, packed: torch.Tensor) -> Tensors:
        growth.resume(len(packed), forward - 1)
        rows = self._tree_rows(len(packed), self.growing.widths[forward - 1], self._scratch)
        growth.expand(rows.ancestor_bits)
        growth.pick(self._forward(rows))
        return ()

    def _finish_captured(self, growth: StepGrowth, forwards: int, packed: torch.Tensor) -> Tensors:
        growth.resume(len(packed), forwards)
        return (growth.finish(self._stored_at[: len(packed)]),)

    def _draft(self, packed: torch.Tensor, emitted: Emitted, greedy: bool) -> torch.Tensor:
        with self._clock("draft"):
            if self._caught_up(packed, emitted):
                return self._replay_growth(len(packed))
        return super()._draft(packed, emitted, greedy)

    def _follow(self, packed: torch.Tensor, emitted: Emitted) -> None:
        with self._clock("draft"):
            if self._caught_up(packed, emitted):
                return
        super()._follow(packed, emitted)

    def _caught_up(self, packed: torch.Tensor, emitted: Emitted) -> bool:
        """Replay the draft over what was ``emitted``, where that was captured."""
        captured = self._catching_up or {}
        most = next((most for most in captured if most >= emitted.most), 0)
        if not most:
            return False
        tokens = emitted.tokens[:, :most]
        return captured[most](packed, emitted.roots, tokens, emitted.counts) is not None

    def _grow_behind(self, packed: torch.Tensor, roots: Roots, greedy: bool) -> torch.Tensor:
        if not self._growing or not self._growing[0].serves(len(packed)):
            return super()._grow_behind(packed, roots, greedy)
        with self._clock("draft"):
            self._growing[0].fill((packed, roots.hidden, roots.positions))
            return self._replay_growth(len(packed))

    def _replay_growth(self, requests: int) -> torch.Tensor:
        """The trees behind the roots that were filled in; their tokens, int64 [R, node_budget]."""
        every = len(self.growing.widths)
        forwards = every if self.most_forwards is None else min(every, self.most_forwards)
        for graphs in self._growing[: 1 + forwards]:
            values = graphs.replay(requests)
        if self._finishing:
            values = self._finishing[forwards].replay(requests)
        self.forwards = 1 + (forwards if self._finishing else every)
        return values[0]
