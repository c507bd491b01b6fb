"""The settings by which one engine's trees are grown and verified."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from dyntree_plugin.tree.growth.base import GrowthConfig, GrowthPlan
from dyntree_plugin.tree.pairs import check_pair
from dyntree_plugin.tree.registry import GROWTHS, RULES, plan_growth
from dyntree_plugin.tree.shape import LEAST_DRAWN_TREE, Budget, Exactness, TreeShape


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The form, growth and verification of an engine's trees.

    With ``calibration``, node values are learned from what the target accepts. ``budget`` says
    whether trees are cut to the nodes whose verification pays. With ``exactness`` distribution, a
    request at a temperature above 0 gets a chain or a tree that is drawn from the draft. With
    ``exactness`` bits, the target computes every row as it would alone.

    Raises:
        ValueError: if the growth does not fit the shape, the rule is biased with the growth, or
            the budget or chains do not go with them.
    """

    shape: TreeShape
    growth: GrowthConfig
    rule: str
    calibration: bool
    budget: Budget = "fixed"
    exactness: Exactness = "tokens"

    def __post_init__(self) -> None:
        check_pair(self.growth.name, self.growing.sampling, self.rule)
        if self.budget == "adaptive" and self.reads_draws:
            raise ValueError(
                f"budget=adaptive is biased with rule={self.rule}: it cuts trees by what they "
                "drew; use rule=match or budget=fixed"
            )
        if self.budget == "adaptive" and not GROWTHS[self.growth.name].ordered:
            fitting = " or ".join(spec.name for spec in GROWTHS.values() if spec.ordered)
            raise ValueError(
                f"budget=adaptive is for growth={fitting}, not {self.growth.name}: other trees do "
                "not stand in the order of their nodes' values; use budget=fixed"
            )
        if self.draws:
            self._check_drawn()
        if self.same_bits and self.rule != "match":
            raise ValueError(
                f"exactness=bits is for rule=match, not rule={self.rule}, which emits another "
                "sample; leave it out"
            )

    def _check_drawn(self) -> None:
        if not self.has_draft:
            raise ValueError(
                "exactness=distribution draws from a draft, and look-up alone has none; use a "
                "draft model or exactness=tokens"
            )
        if self.growth.name != "topk" or self.rule != "match":
            raise ValueError(
                f"exactness=distribution is for growth=topk with rule=match, not growth="
                f"{self.growth.name} with rule={self.rule}; leave it out"
            )

    def with_tries_of(self, most: int) -> TreePlan:
        """Return the plan with at most so many nodes of a trie in a tree."""
        return replace(self, shape=replace(self.shape, grafts=min(self.shape.grafts, most)))

    @property
    def growing(self) -> GrowthPlan:
        """The growth's plan, with the widths of its draft forwards."""
        return _growth_plan(self.growth, self.shape)

    @property
    def candidates(self) -> int:
        """The candidates of a request."""
        return self.shape.grafts + self.growing.children * (1 + sum(self.growing.widths))

    @property
    def scratch_slots(self) -> int:
        """Nodes expanded in one step, each of which needs a KV slot in the draft's cache."""
        return self.growing.scratch_slots

    @property
    def further_forwards(self) -> int:
        """Most draft forwards of a step after the first."""
        return 0 if self.shape.block else len(self.growing.widths)

    @property
    def most_rows(self) -> int:
        """Most rows of a request in a draft forward, or in the growth after it, without prompts."""
        # A block draft may read emitted tokens, and masks for all positions but the first.
        read = self.shape.max_depth + max(1, self.shape.block)
        return max([read, *self.growing.widths])

    @property
    def reads_draws(self) -> bool:
        """Whether verification reasons about the draft's distributions."""
        return RULES[self.rule].drawn is not None

    @property
    def may_draw(self) -> bool:
        """Whether exactness distribution goes with the plan."""
        served = (self.growth.name, self.rule) == ("topk", "match")
        return served and self.has_draft and not self.shape.block

    @property
    def draws(self) -> bool:
        """Whether requests at a temperature above 0 get what is drawn from the draft."""
        return self.exactness == "distribution"

    @property
    def same_bits(self) -> bool:
        """Whether no bit of the target's output depends on what was drafted and batched."""
        return self.exactness == "bits"

    @property
    def drawn_trees(self) -> bool:
        """Whether they get trees, and not chains."""
        return self.draws and self.shape.node_budget >= LEAST_DRAWN_TREE

    @property
    def chain_depth(self) -> int:
        """The most tokens of a drawn chain; 0 if none is drawn."""
        return self.shape.forwards if self.draws else 0

    @property
    def reads_distributions(self) -> bool:
        """Whether verification reads the target's distributions, and not its draws alone."""
        return self.reads_draws or self.draws

    @property
    def coupled(self) -> bool:
        """Whether candidates are ranked with the target sampler's noise. They never are under a
        rule that needs them to be independent of the target's draws, and nor is what is drawn."""
        return self.shape.coupling and not self.reads_draws and not self.draws

    @property
    def calibrated(self) -> bool:
        """Whether node values are learned. Those of draws are the draft's probabilities."""
        return self.calibration and self.growing.sampling == "best"

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model; without one, look-up alone makes the candidates."""
        return self.shape.forwards > 0

    def in_force(self) -> dict[str, Any]:
        """Return names and values to show, without what nothing reads or has."""
        spec = GROWTHS[self.growth.name]
        read = {"node_budget", "max_depth", "coupling"}
        if self.has_draft:
            read |= {*spec.reads}
        if self.shape.drafts > 1:
            read.add("drafts")
        if self.shape.head:
            read.add("head")
        if self.shape.block:
            read = (read | {"block"}) - {"max_forwards"}
        own = self.growth.parameter
        return {
            "growth": spec.name,
            "sampling": self.growing.sampling,
            "rule": self.rule,
            **{name: value for name, value in asdict(self.shape).items() if name in read},
            "lookup": self.shape.grafts > 0,
            "coupling": self.coupled,
            "calibration": self.calibrated,
            "exactness": self.exactness,
            "budget": self.budget,
            **({spec.parameter: own} if spec.parameter and own is not None else {}),
        }


@lru_cache(maxsize=64)
def _growth_plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    return plan_growth(config, shape)
