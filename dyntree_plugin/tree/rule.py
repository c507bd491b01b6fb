"""How a rule, a way to verify trees, describes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from dyntree_plugin.tree.shape import Sampling

if TYPE_CHECKING:
    from dyntree_plugin.tree.papers.drawn import DrawnRule


@dataclass(frozen=True)
class RuleSpec:
    """Everything that the rest of the project knows about a rule.

    ``summary`` ends the sentence "NAME is …" in the option's help. ``exact`` holds the samplings
    with which the rule emits the target's distribution from any tree, and why. ``biased`` holds
    all other samplings, and why the rule is biased with them. ``default_for`` are the samplings
    whose trees use the rule unless another one is asked for. ``drawn`` is the rule itself if it
    reasons about draws; sample-and-match, which looks at the tree alone, leaves it out.

    Raises:
        ValueError: if a sampling is in none or both of ``exact`` and ``biased``, or the rule is
            the default for one that it is biased with.
    """

    name: str
    summary: str
    exact: Mapping[Sampling, str]
    biased: Mapping[Sampling, str]
    default_for: tuple[Sampling, ...] = ()
    drawn: DrawnRule | None = None

    def __post_init__(self) -> None:
        if sorted([*self.exact, *self.biased]) != sorted(get_args(Sampling)):
            raise ValueError(
                f"rule {self.name}: each of {', '.join(get_args(Sampling))} must be either among "
                f"exact={[*self.exact]} or among biased={[*self.biased]}"
            )
        if not {*self.default_for} <= {*self.exact}:
            raise ValueError(
                f"rule {self.name}: default_for={self.default_for} must be among exact="
                f"{[*self.exact]}"
            )
