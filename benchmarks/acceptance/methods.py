"""The methods that are compared: every growth with a rule that is exact with it, as options of the
plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.growth.base import GrowthSpec
from dyntree_plugin.tree.pairs import default_rule
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.registry import GROWTHS

MOST_CHILDREN = 64
"""The most that the plugin's option allows."""

DYSPEC_DRAFT_TEMPERATURE = 0.6
"""The draft's temperature in DySpec's experiments, also with a greedy target (arXiv 2410.11744,
section 5)."""


@dataclass(frozen=True)
class Setting:
    """The conditions that a method is tried under. ``acceptance`` is Sequoia's P at this
    temperature, measured on other prompts. ``drafts``: models that a pool has."""

    budget: int
    temperature: float
    max_depth: int
    acceptance: tuple[float, ...]
    drafts: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


Options = Callable[[Setting], dict[str, Any]]
Model = TypeVar("Model")


@dataclass(frozen=True)
class Method:
    """A way to speculate, with the plugin's ``options`` for a setting.

    ``ours`` marks what this project adds to the papers. ``greedy`` says whether temperature 0
    gives anything that another method does not. ``greedy_draft`` is the draft's temperature where
    the target's is 0; elsewhere they are the same. ``drafts``: the models that are sources.
    ``ngram``: the shortest match of vLLM's own n-gram, whose chain is the tree; None for others.
    ``block``: whether the drawn chain is verified as a whole, and not by the plan's rule.
    """

    name: str
    label: str
    options: Options
    ours: bool = False
    greedy: bool = True
    greedy_draft: float = 1.0
    drafts: Literal["none", "first", "all"] = "first"
    ngram: int | None = None
    block: bool = False

    def plan(self, setting: Setting) -> TreePlan:
        """Return the plan that an engine with these options follows.

        At temperature 0 every rule accepts what ``match`` does, and the draft's best tokens are
        the best children.
        """
        common = {
            "budget": "fixed",
            "calibration": "off",
            "lookup": "off",
            "max_depth": setting.max_depth,
        }
        if self.drafts == "all":
            common["drafts"] = [f"draft {number}" for number in range(2, 1 + setting.drafts)]
        options = DynTreeOptions.parse(common | self.options(setting))
        return options.resolve(setting.budget, draft=self.drafts != "none")

    def drafts_of(self, models: Sequence[Model]) -> Sequence[Model]:
        """Return those of the ``models`` that the method drafts with."""
        return models[: {"none": 0, "first": 1, "all": len(models)}[self.drafts]]


def _of_growth(spec: GrowthSpec, **more: Any) -> Options:
    """Return the options that try a growth with draws and the rule made for them, where it has any.

    At temperature 0 rule match and the draft's best tokens are tried instead.
    """

    def options(setting: Setting) -> dict[str, Any]:
        drawn = next((each for each in spec.samplings if each != "best"), None)
        chosen: dict[str, Any] = {"growth": spec.name}
        if drawn is None or setting.greedy:
            chosen |= {"sampling": "best"} if "best" in spec.samplings else {}
            chosen |= {"rule": "match"}
        else:
            chosen |= {"sampling": drawn, "rule": default_rule(drawn)}
        if "children" in spec.reads:
            chosen["children"] = min(max(setting.budget // 8, 8), 32)
        if "width" in spec.reads:
            chosen["width"] = _width(setting)
        if spec.parameter is not None and spec.parameter in _PARAMETERS:
            chosen[spec.parameter] = _PARAMETERS[spec.parameter](setting)
        return chosen | more

    return options


def _topk(coupling: str, calibration: str) -> Options:
    def options(setting: Setting) -> dict[str, Any]:
        return {
            "growth": "topk",
            "children": 8,
            "width": _width(setting),
            "coupling": coupling,
            "calibration": calibration,
        }

    return options


def _with_look_up(setting: Setting) -> dict[str, Any]:
    every = {"lookup": "on", "max_forwards": setting.max_depth}
    return _topk("on", "on")(setting) | every


def _of_look_up(calibration: str) -> Options:
    """Return options for trees without a draft model."""

    def options(setting: Setting) -> dict[str, Any]:
        return {"lookup": "on", "coupling": "on", "calibration": calibration}

    return options


def _width(setting: Setting) -> int:
    return min(max(setting.budget // 8, 4), 64)


def scaled_expansion(budget: int, max_depth: int) -> tuple[int, ...]:
    """Return SpecInfer's ⟨1, 1, k, 1, 1, 1, 1, 1⟩ for a budget, of at most ``max_depth`` levels.

    A large k at one level wastes the budget where a token before it fails, so the first levels
    branch too when there is room.
    """
    depth = min(8, max_depth, budget)
    tail = depth - 2
    if tail < 1 or budget < 2 + 2 * tail:
        return (1,) * depth
    chains = (budget - 2) / tail
    first = int(chains**0.25)
    second = int((chains / first) ** 0.4)
    third = (budget - first - first * second) // (first * second * tail)
    return (first, second, third, *[1] * (depth - 3))


_PARAMETERS: dict[str, Callable[[Setting], Any]] = {
    "expansion": lambda setting: scaled_expansion(setting.budget, setting.max_depth),
    "acceptance": lambda setting: setting.acceptance,
}
"""Values of the growths' own options. Other growths are tried with their defaults."""

_PUBLISHED: dict[str, dict[str, Any]] = {
    "chain": {"label": "chain"},
    "expansion": {"label": "SpecInfer"},
    "sequoia": {"label": "Sequoia"},
    "dyspec": {"label": "DySpec", "greedy_draft": DYSPEC_DRAFT_TEMPERATURE},
    "threshold": {"label": "DySpec threshold 1/n", "greedy_draft": DYSPEC_DRAFT_TEMPERATURE},
}
"""The names of growths in tables, in their order, and the conditions of the papers' experiments."""

_SERVED = (
    Method("block", "block chain", _of_growth(GROWTHS["chain"]), greedy=False, block=True),
    Method("topk", "top-k, match", _topk("off", "off")),
    Method("coupled", "coupled", _topk("on", "off"), ours=True, greedy=False),
    Method("calibrated", "coupled, calibrated", _topk("on", "on"), ours=True),
    Method("with_look_up", "… with look-up", _with_look_up, ours=True),
    Method("pool", "pool, coupled, calibrated", _topk("on", "on"), ours=True, drafts="all"),
    Method("pool_with_look_up", "pool with look-up", _with_look_up, ours=True, drafts="all"),
    Method("look_up", "look-up alone", _of_look_up("on"), ours=True, drafts="none"),
    *(
        Method(
            f"ngram{least}",
            f"vLLM's n-gram from {least}",
            _of_look_up("off"),
            drafts="none",
            ngram=least,
        )
        for least in (1, 2, 3)
    ),
)


def all_methods() -> dict[str, Method]:
    """Return a method for every registered growth, and what growth topk adds to it last."""
    served = {method.name: method for method in _SERVED}
    names = [*_PUBLISHED, *(name for name in GROWTHS if name not in _PUBLISHED | served)]
    compared = {
        name: Method(
            name=name,
            options=_of_growth(GROWTHS[name]),
            **{"label": name, **_PUBLISHED.get(name, {})},
        )
        for name in names
    }
    return compared | served


METHODS = all_methods()
