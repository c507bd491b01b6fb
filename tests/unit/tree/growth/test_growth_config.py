"""Growths by name: allowed options, and that each growth can run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from growing import grow

from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.registry import GROWTHS, plan_growth
from dyntree_plugin.tree.shape import TreeShape

SHAPE = TreeShape(node_budget=12, max_depth=4, width=3, children=3)
PARAMETERS: dict[str, Any] = {"expansion": (2, 1, 2), "sequoia": (0.6, 0.2)}
every_growth = pytest.mark.parametrize("name", GROWTHS)
in_torch = pytest.mark.parametrize("name", [name for name in GROWTHS if name != "topk"])


@in_torch
def test_a_growth_fills_its_budget_and_keeps_to_its_plan(name: str) -> None:
    plan = plan_growth(GrowthConfig(name, PARAMETERS.get(name)), SHAPE)
    tree = grow(plan, list(range(5)))
    tree.check()
    assert tree.tokens.shape == (5, SHAPE.node_budget)
    assert len(plan.widths) < SHAPE.max_depth
    assert plan.scratch_slots == sum(plan.widths)
    assert int(tree.depths.max()) <= len(plan.widths) + 1
    assert (tree.counts > 0).all()
    assert plan.start is not None
    growth = plan.start(5, torch.full((5,), 99))
    assert (growth.sampling, growth.children, growth.widths) == (
        plan.sampling,
        plan.children,
        plan.widths,
    )


@every_growth
def test_a_growth_reads_of_the_shape_what_it_says_and_nothing_else(name: str) -> None:
    def planned(shape: TreeShape) -> tuple[Any, ...]:
        plan = plan_growth(GrowthConfig(name, PARAMETERS.get(name)), shape)
        return plan.sampling, plan.children, plan.widths

    smaller = {"max_depth": 3, "max_forwards": 3, "width": 2, "children": 2}
    read = {
        field
        for field, value in smaller.items()
        if planned(dataclasses.replace(SHAPE, **{field: value})) != planned(SHAPE)
    }
    assert read == {*GROWTHS[name].reads}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"name": "topdown"}, "growth=topdown must be one of topk, dyspec"),
        ({"name": "threshold", "parameter": 1.5}, "threshold=1.5"),
        ({"name": "expansion", "parameter": (2, 0)}, "expansion="),
        ({"name": "sequoia"}, "growth=sequoia needs acceptance"),
        ({"name": "sequoia", "parameter": (0.9, 0.3)}, "acceptance="),
        ({"name": "chain", "parameter": 0.9}, "growth=chain has no parameter, but got 0.9"),
        ({"name": "topk", "sampling": "without_replacement"}, "sampling=without_replacement"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_growth(GrowthConfig(**config), SHAPE)
