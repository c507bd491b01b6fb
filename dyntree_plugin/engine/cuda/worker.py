"""The workers that vLLM starts on CUDA, with trees and for chains to compare with."""

from __future__ import annotations

from typing import Any

from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker

from dyntree_plugin.engine.attention.choice import log_backend
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.cuda.kinds import KINDS
from dyntree_plugin.engine.cuda.products import check_products
from dyntree_plugin.engine.offloading import keep_draft_on_device
from dyntree_plugin.engine.worker import TreeWorkerMixin


class TreeGPUWorker(TreeWorkerMixin, Worker):
    """vLLM's GPU worker with our runner and attention."""

    kinds = KINDS

    def _make_model_runner(self) -> Any:
        from dyntree_plugin.engine.cuda.runner import make_runner

        if self.device is None:
            raise RuntimeError("vLLM makes the runner before it knows the device")
        return make_runner(self.vllm_config, self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        log_backend(self.vllm_config)
        super().load_model(*args, **kwargs)
        if (plan := tree_plan(self.vllm_config)) is not None and plan.same_bits:
            check_products(self.model_runner.get_model(), self.model_runner.device)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.warm_up_rare_kernels()
        self.model_runner.forget_rehearsal()
        # With graphs, if there are any: as the steps that it is compared with run.
        self.model_runner.measure_costs()
        # Measured steps draw seeds. Requests without one get those that they get without trees.
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        super()._maybe_activate_jit_monitor()
        return times

    def _maybe_activate_jit_monitor(self) -> None:
        """vLLM does it when its kernels are compiled, and then reports every other."""


class ChainGPUWorker(Worker):
    """vLLM's GPU worker with chains, whose draft stays on the device if the target is offloaded.

    Trees are then compared with it: vLLM's engine does not start where layers are prefetched.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        keep_draft_on_device(self.model_runner)
        super().load_model(*args, **kwargs)
