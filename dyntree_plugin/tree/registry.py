"""The growths and rules that there are. Adding one takes its file, and a line here."""

from __future__ import annotations

from dyntree_plugin.tree import match
from dyntree_plugin.tree.growth import topk
from dyntree_plugin.tree.growth.base import GrowthConfig, GrowthPlan, GrowthSpec
from dyntree_plugin.tree.papers import (
    chain,
    dyspec,
    expansion,
    multi_step,
    sequoia,
    threshold,
    without_replacement,
)
from dyntree_plugin.tree.rule import RuleSpec
from dyntree_plugin.tree.shape import TreeShape

GROWTHS: dict[str, GrowthSpec] = {
    spec.name: spec
    for spec in (
        topk.SPEC,
        dyspec.SPEC,
        threshold.SPEC,
        expansion.SPEC,
        sequoia.SPEC,
        chain.SPEC,
    )
}

RULES: dict[str, RuleSpec] = {
    spec.name: spec
    for spec in (
        match.SPEC,
        without_replacement.SPEC,
        multi_step.SPEC,
    )
}

DRAWN_RULES = {spec.name: spec.drawn for spec in RULES.values() if spec.drawn is not None}
"""The rules that reason about draws."""


def plan_growth(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    """Return the growth for an engine, which needs one only.

    Raises:
        ValueError: if there is no such growth, or its settings do not fit it or ``shape``.
    """
    spec = GROWTHS.get(config.name)
    if spec is None:
        raise ValueError(f"growth={config.name} must be one of {', '.join(GROWTHS)}")
    if config.parameter is not None and spec.parameter is None:
        raise ValueError(f"growth={config.name} has no parameter, but got {config.parameter}")
    sampling = config.sampling or spec.samplings[0]
    if sampling not in spec.samplings:
        raise ValueError(
            f"sampling={sampling} must be {' or '.join(spec.samplings)} for growth={config.name}"
        )
    return spec.plan(shape, sampling, config.parameter)
