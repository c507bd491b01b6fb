"""Growths of papers are not compiled."""

from __future__ import annotations

from typing import Any

import torch
from growth_checks import CASE
from growth_steps import VOCAB, Step

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.compose import Composer
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.value import AcceptanceEstimate


def chosen(plan: TreePlan, ops: Any) -> Any:
    """Return the growth that an engine of a plan has."""
    nothing: Any = None
    composer = Composer(
        trees=TreeStore(2, plan, VOCAB, torch.device("cpu")),
        draws=None,
        chained=nothing,
        estimate=AcceptanceEstimate("cpu"),
        ops=ops,
        graphs=nothing,
        tries=None,
        ranking=nothing,
    )
    return composer.growth(Step(CASE).memory)


def test_other_growths_are_not_compiled() -> None:
    for name, kind in (("topk", CompiledGrowth), ("chain", TensorGrowth)):
        plan = TreePlan(CASE.shape, GrowthConfig(name), "match", calibration=True)
        assert isinstance(chosen(plan, CPUOps()), kind)
