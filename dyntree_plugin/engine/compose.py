"""Puts growth, drafting and the walk of verification together, for the plan of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers

from dyntree_kernels.contracts import Drawing, GrowthSettings, StepGrowth
from dyntree_plugin.engine.drawn.samples import DrawnSamples, SamplesWalk
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.papers.walk import DrawnWalk
from dyntree_plugin.engine.step.draft import Drafter, Ranking
from dyntree_plugin.engine.step.growth_stages import DraftStages
from dyntree_plugin.engine.step.ops import Graphs, TreeOps
from dyntree_plugin.engine.step.rows import GrowthMemory, RowWriter
from dyntree_plugin.engine.step.sampled_walk import SampledWalk, TreeWalk
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.source import TrieSource
from dyntree_plugin.tree.value import AcceptanceEstimate


@dataclass(frozen=True)
class Composer:
    """Makes an engine's walk, and its drafter whenever there is new memory for a draft's rows.

    ``draws``: what rules that read draws know of the trees; None for the others. ``chained`` bool
    [slots + 1]: requests whose trees must be chains; the last entry is for padding. ``tries``:
    candidates that need no forward; None without any. ``ranking``: makes what the requests'
    sampling parameters do to a draft's logits, once there is a sampler.
    """

    trees: TreeStore
    draws: DrawStore | None
    chained: torch.Tensor
    estimate: AcceptanceEstimate
    ops: TreeOps
    graphs: Graphs
    tries: TrieSource | None
    ranking: Callable[[], Ranking]

    def drafter(
        self,
        memory: GrowthMemory,
        source: NodeSource | None = None,
        writer: RowWriter | None = None,
    ) -> Drafter:
        """Make a drafter that grows trees in this ``memory``.

        ``source``: a draft model, with the ``writer`` of its rows; None without one.
        """
        plan = self.trees.plan
        stages = DraftStages(
            self.growth(memory),
            memory.of_requests,
            source=source,
            writer=writer,
            tries=self.tries,
            widths=plan.growing.widths,
            max_depth=plan.shape.max_depth,
            chained=self.chained,
            pays=self.ops.pays,
            block=plan.shape.block,
        )
        # Rules that read draws know the distribution of the draws, which must stay the draft's.
        ranked = source is not None and not plan.reads_draws
        return Drafter(
            stages,
            self.ops,
            self.graphs,
            max_depth=plan.shape.max_depth,
            spare=self.trees.spare,
            ranking=self.ranking() if ranked else None,
        )

    def growth(self, memory: GrowthMemory) -> StepGrowth:
        """Make the growth of the plan's trees."""
        trees, plan = self.trees, self.trees.plan
        if plan.growing.start is None:
            return self._compiled(memory)
        pick = ChildPicker(plan, self.ops.perturb, self.estimate)
        return TensorGrowth(trees, pick, memory, self.draws)

    def walk(self, buffers: InputBuffers) -> TreeWalk:
        """Make the walk over the trees of batches in these ``buffers``."""
        trees, ops = self.trees, self.ops
        walk = SampledWalk(trees, ops.walk)
        if self.draws is None:
            return walk
        if trees.plan.draws:
            return SamplesWalk(DrawnSamples(trees, self.draws, ops.decide_trees), walk)
        return DrawnWalk(trees, self.draws, buffers, ops.perturb)

    def _compiled(self, memory: GrowthMemory) -> StepGrowth:
        plan = self.trees.plan
        return self.ops.compiled_growth(
            GrowthSettings(
                of_requests=memory.of_requests,
                node_budget=plan.shape.node_budget,
                children=plan.growing.children,
                widths=plan.growing.widths,
                least=plan.growth.parameter or 0.0,
                longest=memory.last_position,
                coupled=plan.coupled,
                weights=self.estimate.weights if plan.calibrated else None,
                rows=memory.rows,
                trees=self.trees.arrays,
                grafts=plan.shape.grafts,
                max_depth=plan.shape.max_depth,
                shift=plan.shape.shift,
                drawing=self._drawing(),
            )
        )

    def _drawing(self) -> Drawing | None:
        """Return where drawn trees and chains say how they were drawn; None without any."""
        plan = self.trees.plan
        if self.draws is None or not plan.draws:
            return None
        return self.draws.drawing(chains=not plan.drawn_trees)
