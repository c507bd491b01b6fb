"""vLLM's CPU worker with the CUDA engine in it, and the configuration of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import torch

from emulated.attention import stand_in
from emulated.device import emulate, idle

emulate()

from vllm_cpu_runner import install  # noqa: E402

install()

from vllm.config import CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.cpu import model_runner  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402
from vllm.v1.worker.gpu.block_table import BlockTables  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

from dyntree_plugin import plugin  # noqa: E402
from dyntree_plugin.engine import config  # noqa: E402
from dyntree_plugin.engine.cuda.runner import TreeGPUModelRunner  # noqa: E402
from dyntree_plugin.engine.cuda.worker import TreeGPUWorker  # noqa: E402


class _StartsAsOnCuda(CPUWorker):
    compile_or_warm_up_model = gpu_worker.Worker.compile_or_warm_up_model

    def determine_available_memory(self) -> int:
        """As on CUDA, where graphs are captured over a cache that is then thrown away."""
        runner: Any = self.model_runner
        with idle():
            runner.profile_run()
            if runner.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
                runner.profile_cudagraph_memory()
        return int(super().determine_available_memory())


class EmulatedWorker(TreeGPUWorker, _StartsAsOnCuda):
    """The CUDA worker of ours on vLLM's of the CPU."""

    attention_backends: ClassVar[Mapping[str, str]] = {
        "CPU_ATTN": "dyntree_plugin.engine.attention.cuda.TreeTritonAttentionBackend"
    }

    def init_device(self) -> None:
        with mock.patch.object(model_runner, "CPUModelRunner", TreeGPUModelRunner):
            super().init_device()
        init_workspace_manager(torch.device("cpu"))


def _zeroing(stock: Any) -> Any:
    """vLLM's kernel also zeroes the rows that pad a graph; its CPU implementation has none."""

    def gather(self: Any, requests: torch.Tensor, padded: int, *args: Any) -> Any:
        found = stock(self, requests, padded, *args)
        for table in found:
            table[len(requests) :].zero_()
        return found

    return lambda self, idx_mapping, num_reqs_padded, *args: gather(
        self, idx_mapping, num_reqs_padded, *args
    )


def configure() -> None:
    """Have engines with trees be configured as on CUDA, with asynchronous scheduling and graphs."""
    stand_in()
    # Of models that ask for kernels of their own, with their dependencies.
    gpu_worker.kernel_warmup = lambda worker: None  # type: ignore[assignment]
    tables: Any = BlockTables
    tables.gather_block_tables = _zeroing(tables.gather_block_tables)
    plugin.WORKERS["cuda"] = f"{__name__}.EmulatedWorker"
    module: Any = plugin
    admit, settle = plugin.admit, plugin.settle
    sizes: list[list[int] | None] = []

    def admit_as_on_cuda(vllm_config: VllmConfig, options: Any, device_type: str) -> None:
        # Those of graphs, which vLLM's platform of the CPU forgets before it is settled.
        sizes[:] = [vllm_config.compilation_config.cudagraph_capture_sizes]
        admit(vllm_config, options, "cuda")

    def settle_as_on_cuda(vllm_config: VllmConfig, device_type: str) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        if not vllm_config.model_config.enforce_eager:
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            vllm_config.compilation_config.cudagraph_capture_sizes = sizes[0]
            vllm_config._set_cudagraph_sizes()
        settle(vllm_config, "cuda")

    module.admit, module.settle = admit_as_on_cuda, settle_as_on_cuda
    config._drafting_ends = lambda vllm_config: False  # type: ignore[attr-defined]
