"""Drafting on the CPU: between two draft forwards of growth ``topk`` there are two compiled calls
in place of dozens of small tensor operations, which cost more than a small draft's forward."""

from __future__ import annotations

from typing import Any

import torch

from dyntree_kernels.cpu.growth import CompiledGrowth, RowBuffers, TreeArrays
from dyntree_plugin.engine.batch import Requests
from dyntree_plugin.engine.draft_forwards import Roots
from dyntree_plugin.engine.speculator import TreeSpeculator
from dyntree_plugin.engine.trees import TreeStore
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class


class CPUTreeSpeculator(TreeSpeculator):
    """Grows with `CompiledGrowth` where the plan is one of growth ``topk``."""

    _compiled: CompiledGrowth | None = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        rows = RowBuffers(self._input_ids, self._positions, self._slots, self._scratch_slots)
        self._compiled = compiled_growth(
            self.trees, self._pick.estimate, self.max_num_reqs, self.max_model_len, rows
        )

    def _grow(self, requests: Requests, roots: Roots, greedy: bool) -> torch.Tensor:
        growth, at, widths = self._compiled, roots.positions, self.growing.widths
        if growth is None:
            return super()._grow(requests, roots, greedy)
        classes = temperature_class(requests.temperature)
        chained = self._chained[requests.slots]
        growth.start(at, requests.temperature, classes, requests.seeds, chained)
        growth.pick(roots.logits)
        if widths:
            self._scratch_slot_mappings(requests, at)
        of_width = {width: self._tree_rows(at, width, self._scratch) for width in {*widths}}
        self.forwards = 1
        for width in widths:
            rows = of_width[width]
            if growth.expand(rows.ancestor_bits) == 0 or not self._pays(growth.frontier_values):
                break
            self.forwards += 1
            growth.pick(self._forward(rows))
        return growth.finish(requests.slots)


def compiled_growth(
    trees: TreeStore,
    estimate: AcceptanceEstimate,
    requests: int,
    max_model_len: int,
    rows: RowBuffers,
) -> CompiledGrowth | None:
    """Growth of the trees of up to ``requests`` requests; None for a plan that is not compiled."""
    plan, growing = trees.plan, trees.plan.growing
    if plan.growth.name != "topk":
        return None
    return CompiledGrowth(
        requests=requests,
        node_budget=plan.shape.node_budget,
        children=growing.children,
        widths=growing.widths,
        least=plan.growth.min_value or 0.0,
        longest=max_model_len - 1,
        coupled=plan.coupled,
        weights=estimate.weights if plan.calibrated else None,
        rows=rows,
        trees=TreeArrays(*(getattr(trees, name) for name in TreeArrays._fields)),
    )
