"""vLLM's CPU worker with the CUDA engine in it, configured as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest import mock

import torch

from emulated.attention import stand_in
from emulated.device import emulate, idle

emulate()

from vllm_cpu_runner import install, mend_rotary  # noqa: E402

install()
mend_rotary()

from vllm.config import CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.distributed.parallel_state import GroupCoordinator  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.cpu import model_runner  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402
from vllm.v1.worker.gpu.block_table import BlockTables  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

from dyntree_plugin import plugin  # noqa: E402
from dyntree_plugin.admission import check  # noqa: E402
from dyntree_plugin.engine import configuration  # noqa: E402
from dyntree_plugin.engine.attention.indexer import IndexerKind  # noqa: E402
from dyntree_plugin.engine.attention.kind import AttentionKind  # noqa: E402
from dyntree_plugin.engine.attention.latent import LatentKind  # noqa: E402
from dyntree_plugin.engine.cpu import experts, products  # noqa: E402
from dyntree_plugin.engine.cuda.ops import CUDAOps  # noqa: E402
from dyntree_plugin.engine.cuda.runner import make_runner  # noqa: E402
from dyntree_plugin.engine.cuda.worker import TreeGPUWorker  # noqa: E402
from dyntree_plugin.engine.states.kind import StateKind  # noqa: E402
from emulated import sparse  # noqa: E402
from emulated.states import enter_directly  # noqa: E402

_ATTENTION = "dyntree_plugin.engine.attention"
_BACKENDS = {
    "CPU_ATTN": f"{_ATTENTION}.cuda.TreeTritonAttentionBackend",
    "TRITON_ATTN_DIFFKV": f"{_ATTENTION}.cuda.TreeTritonAttentionDiffKVBackend",
}
_STATES = {
    "MambaMixer2": "emulated.states.Mamba2",
    "ShortConv": "dyntree_plugin.engine.states.cuda_layers.TreeShortConv",
    "QwenGatedDeltaNetAttention": "emulated.states.DeltaNet",
    "BailingMoeV3KimiDeltaAttention": "emulated.states.KimiDelta",
}
_LATENT = {
    "CPU_MLA": f"{_ATTENTION}.latent_cuda.TreeTritonMLABackend",
    "FLASHMLA_SPARSE": f"{_ATTENTION}.sparse_cuda.TreeFlashMLASparseBackend",
    "FLASH_ATTN_MLA_SPARSE": f"{_ATTENTION}.sparse_flash_attn.TreeFlashAttnMLASparseBackend",
    "FLASHINFER_MLA_SPARSE": f"{_ATTENTION}.sparse_cuda.TreeFlashInferMLASparseTRTLLMBackend",
}


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

    kinds = (
        AttentionKind("cuda", _BACKENDS, f"{_ATTENTION}.cuda.kv_mover"),
        LatentKind("cuda", _LATENT, f"{_ATTENTION}.latent_cuda.latent_mover"),
        IndexerKind("cuda", {}, f"{_ATTENTION}.sparse_cuda.index_mover"),
        StateKind(_STATES),
    )

    def init_device(self) -> None:
        with mock.patch.object(model_runner, "CPUModelRunner", make_runner):
            super().init_device()
        init_workspace_manager(torch.device("cpu"))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        plan = configuration.tree_plan(self.vllm_config)
        if plan is not None and plan.same_bits:
            experts.keep_bits(self.model_runner.get_model())


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
    """Configure engines with trees as on CUDA, with graphs."""
    stand_in()
    sparse.stand_in()
    enter_directly()
    # In place of those of vLLM's batch-invariant mode, for engines with `exactness` bits.
    products.install()
    # This would warm up kernels of models that bring their own, and import their dependencies.
    gpu_worker.kernel_warmup = lambda worker: None  # type: ignore[assignment]
    tables: Any = BlockTables
    tables.gather_block_tables = _zeroing(tables.gather_block_tables)
    groups: Any = GroupCoordinator
    groups.graph_capture = _graph_capture
    configuration.WORKERS["cuda"] = f"{__name__}.EmulatedWorker"
    of_ops: Any = CUDAOps
    of_ops.kinds = EmulatedWorker.kinds
    # In the interpreter latent attention takes float32, too, in which no token may differ.
    of_admission: Any = check
    of_admission.CUDA_REFUSALS = [r for r in check.CUDA_REFUSALS if "use_mla" not in r.option]
    module: Any = plugin
    admit, configure_scheduler = plugin.admit, plugin.configure_scheduler
    given: list[VllmConfig] = []

    def admit_as_on_cuda(vllm_config: VllmConfig, options: Any, device_type: str) -> None:
        # vLLM's CPU platform later clears the graph sizes, and without an operator for chunks of
        # prompts of latent attention also what these need.
        parts = ("compilation_config", "scheduler_config", "cache_config")
        given[:] = [copy(vllm_config)]
        vars(given[0]).update({name: copy(getattr(vllm_config, name)) for name in parts})
        admit(vllm_config, options, "cuda")

    def configure_as_on_cuda(vllm_config: VllmConfig, device_type: str) -> None:
        (as_given,) = given
        scheduler, wanted = vllm_config.scheduler_config, as_given.scheduler_config
        scheduler.async_scheduling = wanted.async_scheduling
        scheduler.enable_chunked_prefill = wanted.enable_chunked_prefill
        scheduler.max_num_batched_tokens = wanted.max_num_batched_tokens
        # As vLLM's platform of CUDA does.
        scheduler.disable_chunked_mm_input = vllm_config.model_config.is_mm_prefix_lm
        vllm_config.cache_config.enable_prefix_caching = as_given.cache_config.enable_prefix_caching
        vllm_config.cache_config.block_size = as_given.cache_config.block_size
        if not vllm_config.model_config.enforce_eager:
            sizes = as_given.compilation_config.cudagraph_capture_sizes
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            vllm_config.compilation_config.cudagraph_capture_sizes = sizes
            vllm_config._set_cudagraph_sizes()
        configure_scheduler(vllm_config, "cuda")

    module.admit, module.configure_scheduler = admit_as_on_cuda, configure_as_on_cuda
