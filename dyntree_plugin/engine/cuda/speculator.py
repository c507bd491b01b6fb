"""The speculator on CUDA: drafting as graphs."""

from __future__ import annotations

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger

from dyntree_plugin.engine.configuration import uses_adaptive_budget
from dyntree_plugin.engine.cuda.capture import recorder
from dyntree_plugin.engine.cuda.captured import MOST_REQUESTS, CapturedDrafting, CapturedStages
from dyntree_plugin.engine.speculator import TreeSpeculator
from dyntree_plugin.tree.budget.choice import node_buckets

logger = init_logger("vllm.dyntree")


class CUDATreeSpeculator(TreeSpeculator):
    """Captures the stages of drafting, unless the engine is to be eager."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._captured: CapturedStages = kwargs["graphs"]

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make room for graphs; vLLM calls it whenever there is a new KV cache."""
        if cudagraph_mode == CUDAGraphMode.NONE:
            self._captured.prepare_drafting(None)
            return
        most = min(self.max_num_reqs, MOST_REQUESTS)
        if most < self.max_num_reqs:
            logger.info("Batches of more than %d requests draft without CUDA graphs.", most)
        drafting = CapturedDrafting(self.stages, self._numbers_emitted(), most, self._trees.spare)
        self._captured.prepare_drafting(drafting)

    def _numbers_emitted(self) -> list[int]:
        """Bound the tokens that a request can get, for trees of every size that there is."""
        shape = self._trees.shape
        sizes = [shape.node_budget]
        if uses_adaptive_budget(self.vllm_config):
            sizes = [*node_buckets(shape.node_budget)]
        return sorted({1 + min(size, shape.max_depth) for size in sizes})

    def capture(self) -> None:
        if self._captured.has_drafting:
            with graph_capture(device=self.device):
                self._captured.capture_drafting(recorder(self.vllm_config))
