"""Which rule goes with which growth. Any other pair emits tokens of a wrong distribution."""

from __future__ import annotations

from dataclasses import dataclass

from dyntree_plugin.tree.growth.base import GrowthSpec
from dyntree_plugin.tree.registry import GROWTHS, RULES
from dyntree_plugin.tree.rule import RuleSpec
from dyntree_plugin.tree.shape import Sampling

_ONE_CHILD = "one child per node: both rules are then that of speculative sampling"


@dataclass(frozen=True, slots=True)
class Pair:
    """A growth, the way it gets its children, and a rule: whether they are exact, and why."""

    growth: str
    sampling: Sampling
    rule: str
    allowed: bool
    reason: str


def check_pair(growth: str, sampling: Sampling, rule: str) -> None:
    """Refuse a rule that is biased with this growth.

    Raises:
        ValueError: naming growth, sampling and rule, where the bias comes from, and what is
            allowed with each.
    """
    pairs = [p for p in all_pairs() if (p.growth, p.sampling) == (growth, sampling)]
    if not pairs:
        offered = "; ".join(f"{g.name}: {', '.join(g.samplings)}" for g in GROWTHS.values())
        raise ValueError(f"growth={growth} with sampling={sampling} is not one of {offered}")
    pair = next((p for p in pairs if p.rule == rule), None)
    if pair is None:
        raise ValueError(f"rule={rule} must be one of {', '.join(RULES)}")
    if pair.allowed:
        return
    fitting = [p for p in all_pairs() if p.rule == rule and p.allowed]
    raise ValueError(
        f"rule={rule} is biased with growth={growth}, sampling={sampling}: {pair.reason}. "
        f"With growth={growth}, sampling={sampling} use rule="
        f"{' or '.join(allowed_rules(growth, sampling))}; rule={rule} goes with "
        f"{', '.join(f'{p.growth} ({p.sampling})' for p in fitting)}"
    )


def default_rule(sampling: Sampling) -> str:
    """Return the rule that makes the most of children that come in this way."""
    return next(rule.name for rule in RULES.values() if sampling in rule.default_for)


def allowed_rules(growth: str, sampling: Sampling) -> tuple[str, ...]:
    """Return the rules that are exact with a growth, its default first."""
    own = default_rule(sampling)
    rules = [
        p.rule for p in all_pairs() if (p.growth, p.sampling) == (growth, sampling) and p.allowed
    ]
    return tuple(sorted(rules, key=lambda rule: rule != own))


def all_pairs() -> list[Pair]:
    """Return every growth, in each of its samplings, with every rule."""
    return [
        _pair(growth, sampling, rule)
        for growth in GROWTHS.values()
        for sampling in growth.samplings
        for rule in RULES.values()
    ]


def markdown_table() -> str:
    """Return growths against rules as a Markdown table.

    **default** marks the rule that is used if none is asked for.
    """
    lines = [
        f"| growth | children | {' | '.join(f'`{rule}`' for rule in RULES)} |",
        "|---" * (2 + len(RULES)) + "|",
    ]
    for growth in GROWTHS.values():
        for sampling in growth.samplings:
            own = default_rule(sampling)
            marks = [
                "**default**"
                if rule.name == own
                else "exact"
                if _pair(growth, sampling, rule).allowed
                else "refused: biased"
                for rule in RULES.values()
            ]
            lines.append(f"| `{growth.name}` | {sampling} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _pair(growth: GrowthSpec, sampling: Sampling, rule: RuleSpec) -> Pair:
    if sampling in rule.exact:
        return Pair(growth.name, sampling, rule.name, True, rule.exact[sampling])
    if growth.one_child and sampling != "best":
        return Pair(growth.name, sampling, rule.name, True, _ONE_CHILD)
    return Pair(growth.name, sampling, rule.name, False, rule.biased[sampling])
