"""vLLM's CPU worker with the CUDA engine in it, configured as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from emulated.attention import stand_in
from emulated.device import emulate, idle

emulate()

from vllm_cpu_runner import install  # noqa: E402

install()

from vllm.config import CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.distributed.parallel_state import GroupCoordinator  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.cpu import model_runner  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402
from vllm.v1.worker.gpu.block_table import BlockTables  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

from dyntree_plugin import plugin  # noqa: E402
from dyntree_plugin.engine import configuration  # noqa: E402
from dyntree_plugin.engine.attention.kind import AttentionKind  # noqa: E402
from dyntree_plugin.engine.cuda.runner import make_runner  # noqa: E402
from dyntree_plugin.engine.cuda.worker import TreeGPUWorker  # noqa: E402

_ATTENTION = "dyntree_plugin.engine.attention.cuda"
_BACKENDS = {"CPU_ATTN": f"{_ATTENTION}.TreeTritonAttentionBackend"}


class _StartsAsOnCuda(CPUWorker):
    compile_or_warm_up_model = gpu_worker.Worker.compile_or_warm_up_model

    def determine_available_memory(self) -> int:
        """Do as on CUDA: capture graphs over a temporary cache first."""
        runner: Any = self.model_runner
        with idle():
            runner.profile_run()
            if runner.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
                runner.profile_cudagraph_memory()
        return int(super().determine_available_memory())


class EmulatedWorker(TreeGPUWorker, _StartsAsOnCuda):
    """Our CUDA worker on top of vLLM's CPU worker."""

    kinds = (AttentionKind("cuda", _BACKENDS, f"{_ATTENTION}.kv_mover"),)

    def init_device(self) -> None:
        with mock.patch.object(model_runner, "CPUModelRunner", make_runner):
            super().init_device()
        init_workspace_manager(torch.device("cpu"))


def _zeroing(stock: Any) -> Any:
    """Zero the padding rows of a graph, as vLLM's kernel does. Its CPU implementation does not."""

    def gather(self: Any, requests: torch.Tensor, padded: int, *args: Any) -> Any:
        found = stock(self, requests, padded, *args)
        for table in found:
            table[len(requests) :].zero_()
        return found

    return lambda self, idx_mapping, num_reqs_padded, *args: gather(
        self, idx_mapping, num_reqs_padded, *args
    )


@contextmanager
def _graph_capture(self: Any, context: Any = None) -> Iterator[Any]:
    """Capture without the group's communicator, which is no CUDA one here."""
    yield context


def configure() -> None:
    """Configure engines with trees as on CUDA, with asynchronous scheduling and graphs."""
    stand_in()
    # This would warm up kernels of models that bring their own, and import their dependencies.
    gpu_worker.kernel_warmup = lambda worker: None  # type: ignore[assignment]
    tables: Any = BlockTables
    tables.gather_block_tables = _zeroing(tables.gather_block_tables)
    groups: Any = GroupCoordinator
    groups.graph_capture = _graph_capture
    configuration.WORKERS["cuda"] = f"{__name__}.EmulatedWorker"
    module: Any = plugin
    admit, configure_scheduler = plugin.admit, plugin.configure_scheduler
    sizes: list[list[int] | None] = []

    def admit_as_on_cuda(vllm_config: VllmConfig, options: Any, device_type: str) -> None:
        # vLLM's CPU platform later clears the graph sizes.
        sizes[:] = [vllm_config.compilation_config.cudagraph_capture_sizes]
        admit(vllm_config, options, "cuda")

    def configure_as_on_cuda(vllm_config: VllmConfig, device_type: str) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        if not vllm_config.model_config.enforce_eager:
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            vllm_config.compilation_config.cudagraph_capture_sizes = sizes[0]
            vllm_config._set_cudagraph_sizes()
        configure_scheduler(vllm_config, "cuda")

    module.admit, module.configure_scheduler = admit_as_on_cuda, configure_as_on_cuda
