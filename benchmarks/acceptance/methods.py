"""What is compared: every growth with the rule it is exact with, as options of the plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dyntree_plugin.options import DynTreeOptions
from dyntree_plugin.tree.plan import TreePlan

MOST_CHILDREN = 64
"""What the plugin's option allows."""

DYSPEC_DRAFT_TEMPERATURE = 0.6
"""The draft's in DySpec's experiments, with a greedy target too (arXiv 2410.11744, section 5)."""


@dataclass(frozen=True)
class Setting:
    """Where a method is tried. ``acceptance``: Sequoia's P at this temperature, measured on other
    prompts."""

    budget: int
    temperature: float
    max_depth: int
    acceptance: tuple[float, ...]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


Options = Callable[[Setting], dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """``options`` of the plugin for a setting. ``ours``: what this project adds to the papers.
    ``greedy``: whether temperature 0 gives anything that another method does not.
    ``greedy_draft``: the draft's temperature where the target's is 0; else they are the same."""

    name: str
    label: str
    options: Options
    ours: bool = False
    greedy: bool = True
    greedy_draft: float = 1.0

    def plan(self, setting: Setting) -> TreePlan:
        """The plan that an engine with these options follows.

        At temperature 0 every rule accepts what ``match`` does, and the draft's best tokens are
        the best children.
        """
        common = {"budget": "fixed", "calibration": "off", "max_depth": setting.max_depth}
        return DynTreeOptions.parse(common | self.options(setting)).resolve(setting.budget)


def _chain(setting: Setting) -> dict[str, Any]:
    return {"growth": "chain", **_drawn(setting, "without_replacement")}


def _expansion(setting: Setting) -> dict[str, Any]:
    sizes = scaled_expansion(setting.budget, setting.max_depth)
    return {
        "growth": "expansion",
        "expansion": sizes,
        "max_depth": len(sizes),
        **_drawn(setting, "multi_step"),
    }


def _sequoia(setting: Setting) -> dict[str, Any]:
    return {
        "growth": "sequoia",
        "acceptance": setting.acceptance,
        **_drawn(setting, "without_replacement"),
    }


def _drawn(setting: Setting, rule: str) -> dict[str, Any]:
    if setting.greedy:
        return {"sampling": "best", "rule": "match"}
    replaced = "with_replacement" if rule == "multi_step" else "without_replacement"
    return {"sampling": replaced, "rule": rule}


def _slots(growth: str, **more: Any) -> Options:
    def options(setting: Setting) -> dict[str, Any]:
        rule = "match" if setting.greedy else "without_replacement"
        children = min(max(setting.budget // 8, 8), 32)
        width = min(max(setting.budget // 8, 4), 64)
        return {"growth": growth, "rule": rule, "children": children, "width": width, **more}

    return options


def _topk(coupling: str, calibration: str) -> Options:
    def options(setting: Setting) -> dict[str, Any]:
        return {
            "growth": "topk",
            "children": 8,
            "width": min(max(setting.budget // 8, 4), 64),
            "coupling": coupling,
            "calibration": calibration,
        }

    return options


def fixed_threshold(threshold: float) -> Method:
    """DySpec's Algorithm 2 with a threshold of one's own."""
    return Method(
        f"threshold={threshold:g}",
        f"DySpec threshold {threshold:g}",
        _slots("threshold", threshold=threshold),
        greedy_draft=DYSPEC_DRAFT_TEMPERATURE,
    )


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("chain", "chain", _chain),
        Method("expansion", "SpecInfer", _expansion),
        Method("sequoia", "Sequoia", _sequoia),
        Method("dyspec", "DySpec", _slots("dyspec"), greedy_draft=DYSPEC_DRAFT_TEMPERATURE),
        Method(
            "threshold",
            "DySpec threshold 1/n",
            _slots("threshold"),
            greedy_draft=DYSPEC_DRAFT_TEMPERATURE,
        ),
        Method(
            "dynamic_threshold",
            "dynamic threshold",
            _slots("dynamic_threshold"),
            ours=True,
            greedy_draft=DYSPEC_DRAFT_TEMPERATURE,
        ),
        Method("topk", "top-k, match", _topk("off", "off")),
        Method("coupled", "coupled", _topk("on", "off"), ours=True, greedy=False),
        Method("calibrated", "coupled, calibrated", _topk("on", "on"), ours=True),
    )
}


def scaled_expansion(budget: int, max_depth: int) -> tuple[int, ...]:
    """SpecInfer's ⟨1, 1, k, 1, 1, 1, 1, 1⟩ for a budget, of at most ``max_depth`` levels.

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
