"""Drafting on CUDA: the whole of a step's drafting in one graph.

vLLM runs its own draft models without graphs. Here every forward, the growth between them and the
finished tree lie in one graph per number of requests, as nothing of it needs the host.
"""

from __future__ import annotations

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger

from dyntree_plugin.engine.batch import COLUMNS, PADDING
from dyntree_plugin.engine.draft_forwards import Emitted, Roots
from dyntree_plugin.engine.gpu.capture import recorder
from dyntree_plugin.engine.gpu.graphs import Input, RequestGraphs, Tensors, request_sizes
from dyntree_plugin.engine.speculator import TreeSpeculator

logger = init_logger("vllm.dyntree")

MOST_REQUESTS = 128
"""Of a captured batch. The logits that growing starts from take 4 bytes per request and entry of
the vocabulary."""


class GraphedTreeSpeculator(TreeSpeculator):
    """Replays graphs wherever the batch is not too large, unless the engine is to be eager."""

    _decoding: RequestGraphs | None = None
    _growing: RequestGraphs | None = None

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make room for inputs; vLLM calls it whenever there is a new KV cache."""
        self._decoding = self._growing = None
        if cudagraph_mode == CUDAGraphMode.NONE:
            return
        sizes = request_sizes(min(self.max_num_reqs, MOST_REQUESTS))
        if sizes[-1] < self.max_num_reqs:
            logger.info("Batches of more than %d requests draft without CUDA graphs.", sizes[-1])

        def zeros(*shape: int, dtype: torch.dtype, padding: int | None = None) -> Input:
            return Input(torch.zeros(sizes[-1], *shape, dtype=dtype, device=self.device), padding)

        packed = zeros(COLUMNS, dtype=torch.int64, padding=PADDING)
        positions = zeros(dtype=torch.int64)
        emitted = [zeros(self.shape.max_depth + 1, dtype=torch.int64), zeros(dtype=torch.int32)]
        logits = zeros(self.vocab_size, dtype=torch.float32)
        self._decoding = RequestGraphs(self._draft_captured, [packed, positions, *emitted], sizes)
        self._growing = RequestGraphs(self._grow_captured, [packed, logits, positions], sizes)

    @property
    def has_graphs(self) -> bool:
        return self._decoding is not None

    def capture(self) -> None:
        if self._decoding is None or self._growing is None:
            return
        with graph_capture(device=self.device):
            for graphs in (self._decoding, self._growing):
                graphs.capture(recorder(self.vllm_config))

    def _draft_captured(self, packed: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        roots, tokens, counts = tensors
        emitted = Emitted(roots, tokens, counts, most=tokens.shape[1])
        return (super()._draft(packed, emitted, greedy=False),)

    def _grow_captured(self, packed: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        return (super()._grow_behind(packed, Roots(*tensors), greedy=False),)

    def _draft(self, packed: torch.Tensor, emitted: Emitted, greedy: bool) -> torch.Tensor:
        of_emitted = (emitted.roots, emitted.tokens, emitted.counts)
        tokens = self._replay(self._decoding, packed, *of_emitted)
        return super()._draft(packed, emitted, greedy) if tokens is None else tokens

    def _grow_behind(self, packed: torch.Tensor, roots: Roots, greedy: bool) -> torch.Tensor:
        tokens = self._replay(self._growing, packed, roots.logits, roots.positions)
        return super()._grow_behind(packed, roots, greedy) if tokens is None else tokens

    def _replay(
        self, graphs: RequestGraphs | None, *arguments: torch.Tensor
    ) -> torch.Tensor | None:
        if graphs is None:
            return None
        with self._clock("draft"):
            values = graphs(*arguments)
        if values is None:
            return None
        self.forwards = 1 + len(self.growing.widths)
        return values[0]
