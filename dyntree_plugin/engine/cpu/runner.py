"""The runner on the CPU."""

from __future__ import annotations

# Patches torch.cuda and the runner's buffers for the CPU; vLLM's V2 modules must see it first.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

from typing import Any

import numpy as np
from vllm.model_executor.layers.attention import Attention
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.input_batch import InputBatch

import vllm_cpu_runner
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.cpu.kv_move import KVMover
from dyntree_kernels.cpu.learn import learn
from dyntree_kernels.cpu.walk import walk
from dyntree_kernels.cpu.warm_up import warm_up
from dyntree_plugin.engine.attention.cpu import split_kv_cache
from dyntree_plugin.engine.budget.by_tree import AdaptiveBudget
from dyntree_plugin.engine.cpu.kv import Move, PathMover
from dyntree_plugin.engine.cpu.speculator import CPUTreeSpeculator
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.clock import Clock, StageClock
from dyntree_plugin.engine.step.transfer import Send, at_hand
from dyntree_plugin.engine.telemetry.stats import StepRecord
from dyntree_plugin.tree.budget.row_cost import RowCost
from vllm_cpu_runner.long_lists import lift_limits


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    speculator_type = CPUTreeSpeculator
    perturb = staticmethod(perturbed_logits)
    walk = staticmethod(walk)
    learn = staticmethod(learn)
    _budget: AdaptiveBudget | None = None

    def make_clock(self) -> Clock:
        return StageClock()

    def make_send(self) -> Send:
        return at_hand

    def mover_of(self, layers: list[Attention]) -> Move:
        isas: set[Any] = {layer.isa for layer in layers}
        if len(isas) != 1:
            raise RuntimeError(f"one KV cache group holds layers of several layouts: {isas}")
        keys, values = zip(*(split_kv_cache(layer.kv_cache) for layer in layers), strict=True)
        return PathMover(KVMover(keys, values, isas.pop()))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        lift_limits(self.sampler, self.vocab_size)

    def warm_up_kernels(self) -> None:
        vllm_cpu_runner.warm_up()
        warm_up(self.dtype)  # type: ignore[arg-type]  # vLLM has resolved its name by now

    def budget_by(self, cost: RowCost) -> None:
        if self.vllm_config.scheduler_config.async_scheduling:
            super().budget_by(cost)
            return
        ranks = self.parallel_config.tensor_parallel_size
        self._budget = AdaptiveBudget(cost, self.trees.shape.node_budget, ranks)
        self.speculator.budget = self._budget

    def step_ended(self, batch: InputBatch, record: StepRecord) -> None:
        super().step_ended(batch, record)
        if self._budget is not None:
            record.node_budget = self._budget.in_force
            self._budget.observe(batch, self.speculator.forwards, record.times.seconds())

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Each request's drafts for the scheduler, without the padding behind small trees.

        Scheduling is synchronous on the CPU, and the counts are at hand. Of independent draws a
        small tree tells which coincide, so the room for them must not depend on it.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None or self.trees.plan.growing.sampling == "with_replacement":
            return drafts
        slots = [self.req_states.req_id_to_index[req_id] for req_id in drafts.req_ids]
        if self._budget is not None:
            self._admit(np.array(slots), self._budget)
        counts = self.trees.admitted[slots].tolist()  # sync: host memory on the CPU
        cut = [ids[:count] for ids, count in zip(drafts.draft_token_ids, counts, strict=True)]
        return DraftTokenIds(drafts.req_ids, cut)

    def _admit(self, slots: np.ndarray, budget: AdaptiveBudget) -> None:
        """Leave the trees of the last step, at request ``slots`` [R], what they are worth."""
        slots = slots[budget.decode_next]
        if len(slots):
            self.trees.admitted[slots] = budget.cut(self.trees.values[slots])
