"""What a CPU brings to a step."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_kernels.contracts import GrowthSettings, StepGrowth
from dyntree_kernels.cpu.drawn import decide_trees
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.cpu.learn import learn
from dyntree_kernels.cpu.look_up import look_up
from dyntree_kernels.cpu.paths import KERNELS
from dyntree_kernels.cpu.walk import walk
from dyntree_kernels.drawn import KEPT_TOKENS
from dyntree_plugin.engine.budget.by_tree import TreeBudget
from dyntree_plugin.engine.cpu.kinds import KINDS
from dyntree_plugin.engine.step.clock import Clock, StageClock
from dyntree_plugin.engine.step.ops import at_hand
from dyntree_plugin.engine.step.place import place
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter, TensorRows
from dyntree_plugin.engine.step.trees import PlacedTrees


class CPUOps:
    """The `TreeOps` of a CPU: kernels in numba and C, and calls that return when they are done."""

    perturb = staticmethod(perturbed_logits)
    walk = staticmethod(walk)
    learn = staticmethod(learn)
    look_up = staticmethod(look_up)
    paths = KERNELS
    kinds = KINDS
    decide_trees = staticmethod(decide_trees)
    kept_tokens = KEPT_TOKENS["cpu"]
    send = staticmethod(at_hand)

    def __init__(self, budget: TreeBudget | None = None) -> None:
        """``budget``: ends drafting early; None to draft as often as the step allows."""
        self.clock: Clock = StageClock()
        self._budget = budget

    def place(
        self, batch: InputBatch, trees: PlacedTrees, prefill_len: torch.Tensor, *, all_trees: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return place(batch, trees, prefill_len)

    def row_writer(self, memory: RowMemory) -> RowWriter:
        return TensorRows(memory)

    def compiled_growth(self, settings: GrowthSettings) -> StepGrowth:
        return CompiledGrowth(settings)

    def pays(self, growth: StepGrowth) -> bool:
        return self._budget is None or self._budget.drafting_pays(growth.frontier_values)

    def most_emitted(self, bound: int, emitted: torch.Tensor) -> int:
        return min(bound, max(1, int(emitted.max())))
