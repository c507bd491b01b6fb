"""Capture of a call as a CUDA graph, in vLLM's memory pool for graphs."""

from __future__ import annotations

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import current_stream

from dyntree_plugin.engine.cuda.graphs import Call, Record, Replay, Tensors


def recorder(vllm_config: VllmConfig) -> Record:
    """Return a function that captures on the current stream, within vLLM's ``graph_capture``."""

    def record(run: Call) -> tuple[Replay, Tensors]:
        run()  # what is compiled or allocated at a first call must not be captured
        graph = torch.cuda.CUDAGraph()
        with (
            capture_pool(current_platform.get_global_graph_pool(), vllm_config) as pool,
            torch.cuda.graph(graph, pool, stream=current_stream()),  # type: ignore[arg-type]
        ):
            values = run()
        return graph.replay, values

    return record


def free_memory() -> int:
    """Return the device's free bytes once it has done its work."""
    torch.accelerator.synchronize()  # sync: while vLLM profiles memory
    free, _ = torch.accelerator.get_memory_info()
    return free
