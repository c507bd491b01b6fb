"""Puts the stages of drafting together, for the plan of an engine's trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dyntree_kernels.contracts import GrowthSettings, StepGrowth
from dyntree_plugin.engine.papers.chain_growth import ChainGrowth
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.draft import Drafter, Ranking
from dyntree_plugin.engine.step.growth_stages import DraftStages
from dyntree_plugin.engine.step.ops import Graphs, TreeOps
from dyntree_plugin.engine.step.rows import GrowthMemory, RowWriter
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.source import TrieSource
from dyntree_plugin.tree.value import AcceptanceEstimate


@dataclass(frozen=True)
class Composer:
    """Makes the drafter of an engine, whenever there is new memory for a draft's rows.

    ``chained`` bool [slots + 1]: requests whose trees must be chains; the last entry is for
    padding. ``tries``: candidates that need no forward; None without any. ``ranking``: makes what
    the requests' sampling parameters do to a draft's logits, once there is a sampler.
    """

    trees: TreeStore
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
        )
        # Rules that read draws know the law that they were drawn from, which must stay the draft's.
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
        growth = self._compiled(memory)
        if growth is None:
            pick = ChildPicker(plan, self.ops.perturb, self.estimate)
            growth = TensorGrowth(trees, pick, memory)
        if plan.chains:
            growth = ChainGrowth(growth, trees, self.ops.perturb, memory.of_requests)
        return growth

    def _compiled(self, memory: GrowthMemory) -> StepGrowth | None:
        """Make compiled growth; None where there is none for the plan."""
        plan = self.trees.plan
        if plan.growth.name != "topk":
            return None
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
            )
        )
