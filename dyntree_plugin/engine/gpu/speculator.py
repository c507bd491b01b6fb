"""Drafting on CUDA: the whole of a step's drafting in one graph.

vLLM runs its own draft models without graphs. Here every forward, the growth between them and the
finished tree lie in one graph per number of requests, as nothing of it needs the host.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import current_stream

from dyntree_plugin.engine.draft_forwards import Emitted, Requests, Roots
from dyntree_plugin.engine.gpu.graphs import Input, Replay, RequestGraphs, request_sizes
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

        requests = [
            zeros(dtype=torch.int32, padding=-1),
            zeros(dtype=torch.int64, padding=self.trees.spare),
            zeros(dtype=torch.float32),
            zeros(dtype=torch.int64),
            zeros(dtype=torch.bool),
        ]
        positions = zeros(dtype=torch.int64)
        emitted = [zeros(self.shape.max_depth + 1, dtype=torch.int64), zeros(dtype=torch.int32)]
        logits = zeros(self.vocab_size, dtype=torch.float32)
        self._decoding = RequestGraphs(
            self._draft_captured, [*requests, positions, *emitted], sizes
        )
        self._growing = RequestGraphs(self._grow_captured, [*requests, logits, positions], sizes)

    def capture(self) -> None:
        if self._decoding is None or self._growing is None:
            return
        with graph_capture(device=self.device):
            for graphs in (self._decoding, self._growing):
                graphs.capture(self._record)

    def _record(self, run: Any) -> tuple[Replay, torch.Tensor]:
        run()  # what is compiled or allocated at a first call must not be captured
        graph = torch.cuda.CUDAGraph()
        with (
            capture_pool(current_platform.get_global_graph_pool(), self.vllm_config) as pool,
            torch.cuda.graph(graph, pool, stream=current_stream()),  # type: ignore[arg-type]
        ):
            value = run()
        return graph.replay, value

    def _draft_captured(self, *tensors: torch.Tensor) -> torch.Tensor:
        requests, (roots, tokens, counts) = Requests(*tensors[:5]), tensors[5:]
        emitted = Emitted(roots, tokens, counts, most=tokens.shape[1])
        return super()._grow(requests, self._run_over(requests, emitted), greedy=False)

    def _grow_captured(self, *tensors: torch.Tensor) -> torch.Tensor:
        return super()._grow(Requests(*tensors[:5]), Roots(*tensors[5:]), greedy=False)

    def _draft(self, requests: Requests, emitted: Emitted, greedy: bool) -> torch.Tensor:
        of_emitted = (emitted.roots, emitted.tokens, emitted.counts)
        tokens = self._replay(self._decoding, requests, of_emitted)
        return super()._draft(requests, emitted, greedy) if tokens is None else tokens

    def _grow(self, requests: Requests, roots: Roots, greedy: bool) -> torch.Tensor:
        tokens = self._replay(self._growing, requests, (roots.logits, roots.positions))
        return super()._grow(requests, roots, greedy) if tokens is None else tokens

    def _replay(
        self,
        graphs: RequestGraphs | None,
        requests: Requests,
        others: tuple[torch.Tensor, ...],
    ) -> torch.Tensor | None:
        if graphs is None:
            return None
        of_requests = (getattr(requests, field.name) for field in fields(requests))
        with self._clock("draft"):
            tokens = graphs(*of_requests, *others)
        if tokens is not None:
            self.forwards = 1 + len(self.growing.widths)
        return tokens
