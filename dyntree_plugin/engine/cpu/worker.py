"""The workers that vLLM starts on the CPU, with trees and without."""

from __future__ import annotations

# Patches torch.cuda and the runner's buffers for the CPU; vLLM's V2 modules must see it first.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

from typing import Any

from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

import vllm_cpu_runner
from dyntree_plugin.admission.request_limits import WORD_TOKENS_ON_CPU, wrap_seeds
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.cpu.kinds import KINDS
from dyntree_plugin.engine.offloading import keep_draft_on_device
from dyntree_plugin.engine.start.rehearsal import rehearse
from dyntree_plugin.engine.worker import TreeWorkerMixin
from vllm_cpu_runner.long_lists import lift_limits


class TreeCPUWorker(TreeWorkerMixin, CPUWorker):
    """vLLM's CPU worker with our runner, kernels and attention."""

    kinds = KINDS

    def init_device(self) -> None:
        vllm_cpu_runner.install()
        vllm_cpu_runner.mend_adapters()
        vllm_cpu_runner.mend_gathers()
        vllm_cpu_runner.mend_rotary()
        from dyntree_plugin.engine.cpu import products
        from dyntree_plugin.engine.cpu.runner import make_runner

        if (plan := tree_plan(self.vllm_config)) is not None and plan.same_bits:
            products.install()
        # The stock method names the runner's class in its body.
        module: Any = model_runner
        module.CPUModelRunner, stock = make_runner, model_runner.CPUModelRunner
        try:
            super().init_device()  # type: ignore[no-untyped-call]
        finally:
            module.CPUModelRunner = stock

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # vLLM 0.33 runs steps there.
        rehearse(self)
        runner: Any = self.model_runner
        runner.forget_rehearsal()
        runner.measure_costs()
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        return times


class PlainCPUWorker(CPUWorker):
    """vLLM's CPU worker on the V2 runner with our kernels, without trees.

    It is what trees are compared with: the V1 runner, which vLLM otherwise uses on the CPU, draws
    its samples in another way.
    """

    def init_device(self) -> None:
        vllm_cpu_runner.install()
        vllm_cpu_runner.mend_adapters()
        vllm_cpu_runner.mend_gathers()
        vllm_cpu_runner.mend_rotary()
        super().init_device()  # type: ignore[no-untyped-call]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        keep_draft_on_device(self.model_runner)
        super().load_model(*args, **kwargs)
        runner: Any = self.model_runner
        if runner.sampler is not None:  # Only the last stage of a pipeline samples.
            lift_limits(runner.sampler, runner.vocab_size, WORD_TOKENS_ON_CPU)
            wrap_seeds(runner.sampler)

    def compile_or_warm_up_model(self) -> Any:
        rehearse(self)
        return super().compile_or_warm_up_model()
