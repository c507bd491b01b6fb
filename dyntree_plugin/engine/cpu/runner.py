"""The runner on the CPU."""

from __future__ import annotations

# Patches torch.cuda and the runner's buffers for the CPU; vLLM's V2 modules must see it first.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dyntree_kernels.cpu.bitmasks import mask_rows
from dyntree_plugin.admission.node_limit import node_limit
from dyntree_plugin.admission.request_limits import WORD_TOKENS_ON_CPU
from dyntree_plugin.engine.budget.by_tree import TreeBudget
from dyntree_plugin.engine.configuration import sizes_single_trees
from dyntree_plugin.engine.cpu.norms import in_one_call
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.earlier_stage import EarlierStage
from dyntree_plugin.engine.grammar.compiling import GrammarCompiler
from dyntree_plugin.engine.grammar.drafted import DraftGrammars
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.clock import StageTimes
from dyntree_plugin.engine.step.ops import TreeOps
from dyntree_plugin.engine.step.place import without_trees
from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds
from dyntree_plugin.tree.token_tree import NO_VALUE
from vllm_cpu_runner.long_lists import lift_limits


class EarlierCPUStage(EarlierStage, CPUModelRunner):
    """A stage of a pipeline before the last."""

    def make_ops(self) -> TreeOps:
        return CPUOps()


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """Adds the CPU's kernels, and gives the scheduler only the nodes that it should verify."""

    _budget: TreeBudget | None = None

    def make_ops(self) -> TreeOps:
        if sizes_single_trees(self.vllm_config, "cpu"):
            forwards = self.plan.further_forwards
            self._budget = TreeBudget(forwards, drawn_trees=self.plan.drawn_trees)
        nodes = self.num_speculative_steps
        self._node_limits = torch.full((self.max_num_reqs,), nodes, dtype=torch.int64)
        return CPUOps(self._budget)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.plan.same_bits:
            from dyntree_plugin.engine.cpu.experts import keep_bits

            keep_bits(self.model)
        if self.compilation_config.mode == CompilationMode.NONE:
            drafts = [self.speculator, *getattr(self.speculator, "further", ())]
            for model in filter(None, (getattr(each, "model", None) for each in drafts)):
                in_one_call(model)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        for each in scheduler_output.scheduled_new_reqs:
            limit = node_limit(each.sampling_params)
            slot = self.req_states.req_id_to_index[each.req_id]
            self._node_limits[slot] = self.num_speculative_steps if limit is None else limit

    def place(self, batch: InputBatch) -> None:
        super().place(batch)
        if self._budget is not None:
            self._budget.begin(batch)
        if self.plan.same_bits and self.step.mask is None:
            self.step.mask = without_trees(batch)

    def lift_limits(self, sampler: Sampler) -> None:
        lift_limits(sampler, self.vocab_size, WORD_TOKENS_ON_CPU)

    def make_grammars(self) -> DraftGrammars | None:
        if self.trees.plan.reads_draws:  # They read the draft's distribution as it is.
            return None
        # A rehearsed request has no grammar of its own, which a thread would have to compile.
        logits = torch.empty(0, 1).to(self.dtype)
        mask_rows(logits, np.empty(0, dtype=np.int64), torch.empty(0, 1, dtype=torch.int32))
        compiler = GrammarCompiler(self.vllm_config)
        return DraftGrammars(compiler, self.req_states, mask_rows, _least_of_ranks)

    def take_row_cost(self, cost: RowCost) -> None:
        if self._budget is None:
            super().take_row_cost(cost)
        else:
            self._budget.measured(cost)

    def weights_replaced(self, model: str) -> None:
        super().weights_replaced(model)
        if self._budget is not None:
            self._budget.forget()

    def step_ended(self, batch: InputBatch, times: StageTimes) -> StepSeconds | None:
        if self._budget is None or self._plain_steps is None:
            return None
        return self._budget.observe(batch, self.step.drafted.forwards, times.seconds())

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return each request's drafts for the scheduler: the nodes that pay, without padding.

        A scheduler that is synchronous calls it, and then the counts are at hand. Of independent
        draws, a small tree shows which coincide, so the room for them must not depend on it.
        """
        drafts = super().take_draft_token_ids()
        drawn = self.trees.plan.growing.sampling == "with_replacement"
        if drafts is None or drawn or self.scheduler_config.async_scheduling:
            return drafts
        index = [self.req_states.req_id_to_index[req_id] for req_id in drafts.req_ids]
        slots = torch.tensor(index, dtype=torch.int64)
        counts = self.trees.counts[slots]
        # Without growth, the slots hold earlier trees.
        if self._budget is not None and self.step.drafted.growth_forwards is not None:
            beyond = torch.arange(self.trees.shape.node_budget) >= self._node_limits[slots, None]
            values = self.trees.values[slots].masked_fill(beyond, NO_VALUE)
            forwards = self.trees.forwards[slots]
            counts = self._budget.cut(values, counts, forwards, self.drawn(index))
            self.trees.admit(slots, counts)
        offered = counts.tolist()  # sync: host memory on the CPU
        cut = [ids[:count] for ids, count in zip(drafts.draft_token_ids, offered, strict=True)]
        return replace(drafts, draft_token_ids=cut)


def make_runner(vllm_config: VllmConfig, device: torch.device) -> CPUModelRunner:
    """Make the runner of this process's stage of the pipeline."""
    last = get_pp_group().is_last_rank
    return (TreeCPUModelRunner if last else EarlierCPUStage)(vllm_config, device)


def _least_of_ranks(numbers: list[int]) -> list[int]:
    """Return the least of every rank's numbers, place by place."""
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return numbers
    least = torch.tensor(numbers)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, ranks.cpu_group)
    return least.tolist()  # sync: host memory
