"""Which rule goes with which tree. Any other pair gives tokens, and of the wrong law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dyntree_plugin.tree.names import Rule, Sampling
from dyntree_plugin.tree.papers.drawn import DrawnRule
from dyntree_plugin.tree.papers.multi_step import MULTI_STEP
from dyntree_plugin.tree.papers.without_replacement import WITHOUT_REPLACEMENT

DRAWN_RULES: Final[dict[Rule, DrawnRule]] = {
    "without_replacement": WITHOUT_REPLACEMENT,
    "multi_step": MULTI_STEP,
}
"""The rules that reason about draws. The third, ``match``, looks at the tree alone."""

SAMPLINGS: Final[dict[str, tuple[Sampling, ...]]] = {
    "topk": ("best",),
    "dyspec": ("without_replacement",),
    "threshold": ("without_replacement",),
    "dynamic_threshold": ("without_replacement",),
    "sequoia": ("without_replacement", "best"),
    "expansion": ("with_replacement", "without_replacement", "best"),
    "chain": ("best", "without_replacement", "with_replacement"),
}
"""How the children of each growth can be had. All of those that draw decide whether to draw before
they know what it gives; a growth that does not has no place in the sampled rules' columns."""

_OWN_RULE: Final[dict[Sampling, Rule]] = {
    "best": "match",
    "without_replacement": "without_replacement",
    "with_replacement": "multi_step",
}

_ANY_TREE = "the tokens are the target's own draws, whatever the tree"
_ITS_LAW = "the rule accepts with the chances that the children were drawn with"
_ONE_CHILD = "one child per node: both rules are then that of speculative sampling"
_BIAS: Final[dict[tuple[Sampling, Rule], str]] = {
    ("best", "without_replacement"): "the children are the draft's best tokens, picked and not "
    "drawn, so other tokens of the draft never get the tries that the rule counts on",
    ("best", "multi_step"): "the children are the draft's best tokens, picked and not drawn, so "
    "other tokens of the draft never get the tries that the rule counts on",
    ("without_replacement", "multi_step"): "the children were drawn from what earlier draws left "
    "of the draft, and the rule takes each to come from all of it",
    ("with_replacement", "without_replacement"): "the children were drawn independently, and the "
    "rule takes what was drawn before to be out of the draft",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A growth, the way it gets its children, a rule; whether they are exact together, and why."""

    growth: str
    sampling: Sampling
    rule: Rule
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
        offered = "; ".join(f"{name}: {', '.join(ways)}" for name, ways in SAMPLINGS.items())
        raise ValueError(f"growth={growth} with sampling={sampling} is not one of {offered}")
    pair = next((p for p in pairs if p.rule == rule), None)
    if pair is None:
        raise ValueError(f"rule={rule} must be one of {', '.join(p.rule for p in pairs)}")
    if pair.allowed:
        return
    fitting = ", ".join(f"{p.growth} ({p.sampling})" for p in all_pairs() if _fits(p, rule))
    raise ValueError(
        f"rule={rule} is biased with growth={growth}, sampling={sampling}: {pair.reason}. "
        f"With growth={growth}, sampling={sampling} use rule="
        f"{' or '.join(allowed_rules(growth, sampling))}; rule={rule} goes with {fitting}"
    )


def default_rule(sampling: Sampling) -> Rule:
    """The rule that makes the most of children got in this way."""
    return _OWN_RULE[sampling]


def allowed_rules(growth: str, sampling: Sampling) -> tuple[Rule, ...]:
    """The rules that are exact with a growth, its default first."""
    own = default_rule(sampling)
    return tuple(
        sorted(
            (
                p.rule
                for p in all_pairs()
                if (p.growth, p.sampling) == (growth, sampling) and p.allowed
            ),
            key=lambda rule: rule != own,
        )
    )


def all_pairs() -> list[Pair]:
    """Every growth with every rule."""
    return [
        _pair(growth, sampling, rule)
        for growth, samplings in SAMPLINGS.items()
        for sampling in samplings
        for rule in ("match", *DRAWN_RULES)
    ]


def markdown_table() -> str:
    """Growths against rules, for the README; **default** is what is used if no rule is named."""
    rules: list[Rule] = ["match", *DRAWN_RULES]
    lines = [
        f"| growth | children | {' | '.join(f'`{rule}`' for rule in rules)} |",
        "|---" * (2 + len(rules)) + "|",
    ]
    for growth, samplings in SAMPLINGS.items():
        for sampling in samplings:
            marks = [
                "**default**"
                if rule == default_rule(sampling)
                else "exact"
                if _pair(growth, sampling, rule).allowed
                else "refused: biased"
                for rule in rules
            ]
            lines.append(f"| `{growth}` | {sampling} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _pair(growth: str, sampling: Sampling, rule: Rule) -> Pair:
    if rule == "match":
        return Pair(growth, sampling, rule, True, _ANY_TREE)
    if rule == default_rule(sampling):
        return Pair(growth, sampling, rule, True, _ITS_LAW)
    if growth == "chain" and sampling != "best":
        return Pair(growth, sampling, rule, True, _ONE_CHILD)
    return Pair(growth, sampling, rule, False, _BIAS[sampling, rule])


def _fits(pair: Pair, rule: str) -> bool:
    return pair.rule == rule and pair.allowed
