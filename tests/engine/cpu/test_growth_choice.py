"""Plans that compiled growth does not serve are grown on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from growth_checks import CASE
from growth_steps import VOCAB, Step

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.compose import Composer
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.ops import at_hand
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


@pytest.mark.parametrize(("most", "compiled"), [(40, True), (39, False)])
def test_more_candidates_than_are_compiled_for_are_the_tensors(
    most: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the limit is that of the CUDA kernels, which need Triton")
    from dyntree_plugin.engine.cuda import ops as cuda_ops

    monkeypatch.setattr(cuda_ops, "MOST_CANDIDATES", most)
    growth = chosen(CASE.plan, cuda_ops.CUDAOps(at_hand))  # 10 expansions of 4 children
    assert isinstance(growth, TensorGrowth) != compiled
