"""Everything that an engine's trees are grown and verified by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from dyntree_plugin.tree.growth import SHAPE_READ, GrowthConfig, GrowthPlan, plan_growth
from dyntree_plugin.tree.names import Budget, Rule
from dyntree_plugin.tree.papers.rules import check_pair
from dyntree_plugin.tree.shape import TreeShape


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How trees look, grow and are verified. ``calibration``: node values are learned from what
    the target accepts. ``budget``: whether trees are cut to what their verification is worth.

    Raises:
        ValueError: if the growth does not fit the shape, the rule is biased with the growth, or
            the budget does not go with them.
    """

    shape: TreeShape
    growth: GrowthConfig
    rule: Rule
    calibration: bool
    budget: Budget = "fixed"

    def __post_init__(self) -> None:
        check_pair(self.growth.name, self.growing.sampling, self.rule)
        if self.budget == "adaptive" and self.reads_draws:
            raise ValueError(
                f"budget=adaptive is biased with rule={self.rule}: it cuts trees by what they "
                "drew; use rule=match or budget=fixed"
            )
        if self.budget == "adaptive" and self.growth.name != "topk":
            raise ValueError(
                f"budget=adaptive is for growth=topk, not {self.growth.name}: other trees do not "
                "stand in the order of their nodes' values; use budget=fixed"
            )

    @property
    def growing(self) -> GrowthPlan:
        """The growth's own plan, with the widths of its draft forwards."""
        return _growth_plan(self.growth, self.shape)

    @property
    def scratch_slots(self) -> int:
        """Nodes expanded in one step, each of which needs a KV slot in the draft's cache."""
        return self.growing.scratch_slots

    @property
    def reads_draws(self) -> bool:
        """Whether verification reasons about the draft's distributions."""
        return self.rule != "match"

    @property
    def coupled(self) -> bool:
        """Whether candidates are ranked with the target sampler's noise: never under a rule that
        needs them to be independent of the target's draws."""
        return self.shape.coupling and not self.reads_draws

    @property
    def calibrated(self) -> bool:
        """Whether node values are learned: those of draws are the draft's probabilities."""
        return self.calibration and self.growing.sampling == "best"

    def in_force(self) -> dict[str, Any]:
        """Names and values to show, without parameters that the growth does not have or read."""
        growth = {name: value for name, value in asdict(self.growth).items() if value is not None}
        read = ("node_budget", "max_depth", *SHAPE_READ[self.growth.name])
        return {
            "growth": growth.pop("name"),
            "sampling": growth.pop("sampling", self.growing.sampling),
            "rule": self.rule,
            **{name: value for name, value in asdict(self.shape).items() if name in read},
            "coupling": self.coupled,
            "calibration": self.calibrated,
            "budget": self.budget,
            **growth,
        }


@lru_cache(maxsize=64)
def _growth_plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    return plan_growth(config, shape)
