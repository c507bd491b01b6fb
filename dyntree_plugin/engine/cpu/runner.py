"""The runner on the CPU."""

from __future__ import annotations

# Patches torch.cuda and the runner's buffers for the CPU; vLLM's V2 modules must see it first.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.input_batch import InputBatch

import vllm_cpu_runner
from dyntree_kernels.cpu.warm_up import warm_up
from dyntree_plugin.engine.budget.by_tree import TreeBudget
from dyntree_plugin.engine.configuration import sizes_single_trees
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.limits import WORD_TOKENS_ON_CPU
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.clock import StageTimes
from dyntree_plugin.engine.step.ops import TreeOps
from dyntree_plugin.tree.budget.row_cost import RowCost
from vllm_cpu_runner.long_lists import lift_limits


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """Adds the CPU's kernels, and hands the scheduler only the nodes that it should verify."""

    _budget: TreeBudget | None = None

    def make_ops(self) -> TreeOps:
        if sizes_single_trees(self.vllm_config, "cpu"):
            self._budget = TreeBudget()
        return CPUOps(self._budget)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        lift_limits(self.sampler, self.vocab_size, WORD_TOKENS_ON_CPU)

    def warm_up_kernels(self) -> None:
        vllm_cpu_runner.warm_up()
        warm_up(self.dtype)  # type: ignore[arg-type]  # vLLM has resolved its name by now

    def take_row_cost(self, cost: RowCost) -> None:
        if self._budget is None:
            super().take_row_cost(cost)
        else:
            self._budget.measured(cost)

    def step_ended(self, batch: InputBatch, times: StageTimes) -> None:
        if self._budget is not None:
            forwards = self.driver.step.drafted.forwards
            self._budget.observe(batch, forwards, times.seconds())

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return each request's drafts for the scheduler: the nodes that pay, without padding.

        A scheduler that is synchronous calls it, and then the counts are at hand. Of independent
        draws, a small tree tells which coincide, so the room for them must not depend on it.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None or self.trees.plan.growing.sampling == "with_replacement":
            return drafts
        index = [self.req_states.req_id_to_index[req_id] for req_id in drafts.req_ids]
        slots = torch.tensor(index, dtype=torch.int64)
        counts = self.trees.counts[slots]
        if self._budget is not None:
            counts = self._budget.cut(self.trees.values[slots], counts)
            self.trees.admit(slots, counts)
        offered = counts.tolist()  # sync: host memory on the CPU
        cut = [ids[:count] for ids, count in zip(drafts.draft_token_ids, offered, strict=True)]
        return DraftTokenIds(drafts.req_ids, cut)
