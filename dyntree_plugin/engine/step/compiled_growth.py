"""Drafting with growth ``topk`` in a few compiled calls between two draft forwards, in place of
dozens of small tensor operations, which cost more than a small draft's forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from dyntree_kernels.growth import GrowthSettings, RowBuffers, StepGrowth
from dyntree_plugin.engine.step.draft import TreeSpeculator
from dyntree_plugin.engine.step.forwards import Roots
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.value import AcceptanceEstimate

G = TypeVar("G", bound=StepGrowth)


class CompiledTreeSpeculator(TreeSpeculator):
    """Grows with ``growth_type`` where the plan is one of growth ``topk``."""

    growth_type: ClassVar[Callable[..., StepGrowth]]
    most_candidates: ClassVar[float] = math.inf
    """Of a request, that growth is compiled for; of more it is the tensors'."""

    _compiled: StepGrowth | None = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        self._compiled = None
        if self.growing.children * (1 + self.growing.scratch_slots) > self.most_candidates:
            return
        # Where the trees are stored that grow.
        self._stored_at = self._root_positions.new_zeros(self.max_num_reqs)
        rows = RowBuffers(self._input_ids, self._positions, self._slots, self._scratch_slots)
        sizes = (self.max_num_reqs, self.max_model_len)
        self._compiled = compiled_growth(
            type(self).growth_type, self.trees, self._pick.estimate, *sizes, rows
        )

    def _grow(self, requests: Requests, roots: Roots, greedy: bool) -> torch.Tensor:
        growth, widths = self._compiled, self.growing.widths[: self.most_forwards]
        if growth is None:
            return super()._grow(requests, roots, greedy)
        self._start(growth, requests, roots)
        num_reqs = len(roots.positions)
        of_width = {width: self._tree_rows(num_reqs, width, self._scratch) for width in {*widths}}
        for width in widths:
            rows = of_width[width]
            if not self._goes_on(growth.expand(rows.ancestor_bits), growth.frontier_values):
                break
            self.forwards += 1
            growth.pick(self._forward(rows))
        return growth.finish(self._stored_at[:num_reqs])

    def _start(self, growth: StepGrowth, requests: Requests, roots: Roots) -> None:
        """Begin, and pick the roots' children."""
        self._begin(growth, requests, roots.positions)
        growth.pick(self._logits(roots))

    def _begin(self, growth: StepGrowth, requests: Requests, at: torch.Tensor) -> None:
        """Note what grows behind roots ``at`` [R], and what the rows of the forwards to come
        see."""
        slots = requests.slots
        self._stored_at[: len(slots)].copy_(slots)
        classes = requests.classes.clamp(min=0)
        growth.start(at, requests.temperature, classes, requests.seeds, self._chained[slots])
        if self.growing.widths:
            self._scratch_slot_mappings(requests, at)
            self._see(at, self._scratch)


def compiled_growth(
    growth_type: Callable[[GrowthSettings], G],
    trees: TreeStore,
    estimate: AcceptanceEstimate,
    requests: int,
    max_model_len: int,
    rows: RowBuffers,
) -> G | None:
    """Growth of the trees of up to ``requests`` requests; None for a plan that is not compiled."""
    plan, growing = trees.plan, trees.plan.growing
    if plan.growth.name != "topk":
        return None
    settings = GrowthSettings(
        requests=requests,
        node_budget=plan.shape.node_budget,
        children=growing.children,
        widths=growing.widths,
        least=plan.growth.min_value or 0.0,
        longest=max_model_len - 1,
        coupled=plan.coupled,
        weights=estimate.weights if plan.calibrated else None,
        rows=rows,
        trees=trees.arrays,
    )
    return growth_type(settings)
