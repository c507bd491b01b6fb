"""The growth that serves, and the parts that all growths share; `tree.registry` lists them all."""

from dyntree_plugin.tree.growth.base import (
    Frontier,
    Growth,
    GrowthConfig,
    GrowthPlan,
    GrowthSpec,
)

__all__ = ["Frontier", "Growth", "GrowthConfig", "GrowthPlan", "GrowthSpec"]
