"""A growth and a rule that only the registry knows can be used everywhere.

They are grown, verified and selected by options.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from exactness import distance, emitted_by_draws, grow_every_way, random_model
from growing import grow

from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.growth import GrowthConfig, GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers.drawn import DrawnRule, Odds
from dyntree_plugin.tree.papers.static import StaticGrowth, StaticTree
from dyntree_plugin.tree.registry import GROWTHS, RULES, plan_growth
from dyntree_plugin.tree.rule import RuleSpec
from dyntree_plugin.tree.shape import Sampling, TreeShape

SHAPE = TreeShape(node_budget=4, max_depth=2, width=1, children=2, coupling=False)


def fork_plan(shape: TreeShape, sampling: Sampling, parameter: None) -> GrowthPlan:
    """Plan two children of the root, and one child of the first."""
    tree = StaticTree((-1, -1, 0), (0, 1, 0))
    start = partial(StaticGrowth, tree=tree, node_budget=shape.node_budget, sampling=sampling)
    return GrowthPlan(sampling, tree.most_children, tree.widths, start)


def never(target: torch.Tensor, *of_draws: torch.Tensor) -> Odds:
    """Accept no draw, so that every token is the target's own."""
    _, tokens, _ = of_draws
    return Odds(torch.zeros_like(tokens, dtype=target.dtype), target)


FORK = GrowthSpec(
    name="fork",
    summary="a fork",
    reads=(),
    samplings=("without_replacement", "best"),
    plan=fork_plan,
)
NEVER = RuleSpec(
    name="never",
    summary="the refusal of every draw",
    exact=dict.fromkeys(("best", "without_replacement"), "no draw counts"),
    biased={"with_replacement": "for the test"},
    drawn=DrawnRule(never, lambda draws, scheduled: draws),
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROWTHS, FORK.name, FORK)
    monkeypatch.setitem(RULES, NEVER.name, NEVER)


def test_a_registered_growth_grows() -> None:
    tree = grow(plan_growth(GrowthConfig("fork"), SHAPE), [1, 2])
    tree.check()
    assert tree.parents[:, :3].tolist() == [[-1, -1, 0]] * 2


@pytest.mark.parametrize("rule", ["never", "without_replacement"])
def test_a_registered_pair_verifies_exactly(rule: str) -> None:
    draft, target = random_model(0, 3, 3), random_model(1, 3, 3)
    made = grow_every_way(plan_growth(GrowthConfig("fork"), SHAPE), draft)
    drawn = RULES[rule].drawn
    assert drawn is not None
    assert distance(emitted_by_draws(drawn, made, target, 4), target) < 1e-12


def test_registered_names_are_options_that_resolve() -> None:
    plan = DynTreeOptions.parse({"growth": "fork"}).resolve(4)
    assert (plan.rule, plan.budget, plan.shape.max_depth) == ("without_replacement", "fixed", 2)
    assert plan.in_force()["growth"] == "fork"
    never = DynTreeOptions.parse({"growth": "fork", "rule": "never", "width": 3})
    plan = never.resolve(4)
    assert plan.reads_draws
    assert not plan.coupled
    assert [*never.without_effect(plan)] == [
        "dyntree.width=3 has no effect with growth=fork: leave it out"
    ]
    with pytest.raises(ValueError, match="rule=never is biased with growth=expansion"):
        DynTreeOptions.parse({"growth": "expansion", "expansion": [2], "rule": "never"}).resolve(4)


def test_a_rule_that_leaves_a_sampling_open_is_refused() -> None:
    with pytest.raises(ValueError, match="with_replacement must be either among exact="):
        RuleSpec("half", "half a rule", {"best": "so"}, {"without_replacement": "not so"})
    exact, *others = ("best", "without_replacement", "with_replacement")
    with pytest.raises(ValueError, match="default_for="):
        RuleSpec("late", "a rule", {exact: "so"}, dict.fromkeys(others, "no"), (others[0],))


def test_what_serves_loads_none_of_the_papers() -> None:
    """Only the registry knows them, and the code that asks it for a growth or a rule."""
    serving = "growth.topk", "match", "token_tree", "value", "noise", "step"
    code = (
        "import sys, importlib;"
        f"[importlib.import_module('dyntree_plugin.tree.' + name) for name in {serving}];"
        "sys.exit([n for n in sys.modules if n.startswith('dyntree_plugin.tree.papers')] or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
