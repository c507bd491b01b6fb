"""The workers that vLLM starts for an engine with trees."""

from __future__ import annotations

# Patches torch.cuda and the runner's buffers for the CPU; vLLM's V2 modules must see it first.
import vllm.v1.worker.cpu.shm  # noqa: F401, I001  isort: skip

from unittest import mock

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from dyntree_plugin.engine import cpu


class TreeCPUWorker(CPUWorker):
    """vLLM's CPU worker with our runner, kernels and attention."""

    def init_device(self) -> None:
        cpu.install()
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "dyntree_plugin.engine.attention.cpu.TreeCPUAttentionBackend",
        )
        from dyntree_plugin.engine.runner import TreeCPUModelRunner

        # The stock method names the runner's class in its body.
        with mock.patch.object(model_runner, "CPUModelRunner", TreeCPUModelRunner):
            super().init_device()
