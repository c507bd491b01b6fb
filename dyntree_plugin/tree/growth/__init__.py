"""Ways to grow a tree, one file each; `GROWTHS` is the list."""

from __future__ import annotations

from collections.abc import Callable

from dyntree_plugin.tree.growth import topk
from dyntree_plugin.tree.growth.base import (
    SHAPE_READ,
    Frontier,
    Growth,
    GrowthConfig,
    GrowthPlan,
)
from dyntree_plugin.tree.names import Sampling
from dyntree_plugin.tree.papers import (
    chain,
    dynamic_threshold,
    dyspec,
    expansion,
    sequoia,
    threshold,
)
from dyntree_plugin.tree.shape import TreeShape

__all__ = [
    "GROWTHS",
    "SHAPE_READ",
    "Frontier",
    "Growth",
    "GrowthConfig",
    "GrowthPlan",
    "Sampling",
    "plan_growth",
]

GROWTHS: dict[str, Callable[[GrowthConfig, TreeShape], GrowthPlan]] = {
    "topk": topk.plan,
    "dyspec": dyspec.plan,
    "threshold": threshold.plan,
    "dynamic_threshold": dynamic_threshold.plan,
    "expansion": expansion.plan,
    "sequoia": sequoia.plan,
    "chain": chain.plan,
}


def plan_growth(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    """The growth for an engine, to be made once.

    Raises:
        ValueError: if there is no such growth, or its parameters do not fit it or ``shape``.
    """
    if config.name not in GROWTHS:
        raise ValueError(f"growth={config.name} must be one of {', '.join(GROWTHS)}")
    return GROWTHS[config.name](config, shape)
