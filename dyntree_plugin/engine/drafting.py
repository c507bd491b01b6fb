"""Drafting for vLLM's speculators: put together for a plan, and called in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_kernels.contracts import GrowthSettings, RowBuffers, StepGrowth
from dyntree_plugin.engine.papers.chain_growth import ChainGrowth
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.draft import Drafter, Ranking
from dyntree_plugin.engine.step.driver import StepDriver
from dyntree_plugin.engine.step.growth_stages import DraftStages
from dyntree_plugin.engine.step.ops import Graphs, TreeOps
from dyntree_plugin.engine.step.records import Sampled
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.source import TrieSource
from dyntree_plugin.tree.value import AcceptanceEstimate


@dataclass
class Drafting:
    """What a speculator drafts with.

    ``chained`` bool [slots + 1]: requests whose trees must be chains; the last entry is for
    padding. ``tries``: candidates that need no forward; None without any. ``requests``: the most
    requests of a step. ``ranking``: makes what the requests' sampling parameters do to a draft's
    logits, once there is a sampler.
    """

    driver: StepDriver
    trees: TreeStore
    chained: torch.Tensor
    estimate: AcceptanceEstimate
    ops: TreeOps
    graphs: Graphs
    tries: TrieSource | None
    requests: int
    ranking: Callable[[], Ranking]
    _drafter: Drafter | None = field(default=None, init=False)

    def compose(
        self,
        source: NodeSource | None,
        buffers: RowBuffers,
        stored_at: torch.Tensor,
        last_position: int,
    ) -> None:
        """Put the stages together, whenever there is new memory for a draft model's rows.

        ``source``: the draft model; None without one. ``stored_at``: as in `DraftStages`.
        ``last_position``: that of the longest text's last token.
        """
        plan, ops = self.trees.plan, self.ops
        growth = self._growth(buffers, last_position)
        if plan.chains:
            growth = ChainGrowth(growth, self.trees, ops.perturb, stored_at)
        self.stages = DraftStages(
            source,
            self.tries,
            growth,
            stored_at,
            plan.growing.widths,
            self.chained,
            ops.pays,
            plan.shape.max_depth,
        )
        # Rules that read draws know the law that they were drawn from, which must stay the draft's.
        ranked = source is not None and not plan.reads_draws
        self._drafter = Drafter(
            self.stages,
            ops,
            self.graphs,
            plan.shape.max_depth,
            self.trees.spare,
            self.ranking() if ranked else None,
        )

    def draft(self, batch: InputBatch, sampled: Sampled, *, grows: bool) -> torch.Tensor | None:
        """Draft as `StepDriver.draft` does."""
        if self._drafter is None:
            raise RuntimeError("vLLM asked for drafts before there was a KV cache")
        return self.driver.draft(self._drafter, batch, sampled, grows=grows)

    def _growth(self, buffers: RowBuffers, last_position: int) -> StepGrowth:
        """Choose compiled growth where there is one for the plan; else the tensors'."""
        trees, plan = self.trees, self.trees.plan
        if plan.growth.name == "topk":
            settings = GrowthSettings(
                requests=self.requests,
                node_budget=plan.shape.node_budget,
                children=plan.growing.children,
                widths=plan.growing.widths,
                least=plan.growth.parameter or 0.0,
                longest=last_position,
                coupled=plan.coupled,
                weights=self.estimate.weights if plan.calibrated else None,
                rows=buffers,
                trees=trees.arrays,
                grafts=plan.shape.grafts,
                max_depth=plan.shape.max_depth,
                shift=plan.shape.shift,
            )
            compiled = self.ops.compiled_growth(settings)
            if compiled is not None:
                return compiled
        pick = ChildPicker(plan, self.ops.perturb, self.estimate)
        return TensorGrowth(trees, pick, buffers, last_position)
