"""How every growth is asked for and driven, and the growth that serves; see `tree.registry`."""

from dyntree_plugin.tree.growth.base import (
    Frontier,
    Growth,
    GrowthConfig,
    GrowthPlan,
    GrowthSpec,
)

__all__ = ["Frontier", "Growth", "GrowthConfig", "GrowthPlan", "GrowthSpec"]
