"""The options of the plugin: the only source of the ``--dyntree`` flag, its help and the README's
table."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from dyntree_plugin.tree.names import Budget, GrowthName, Rule, Sampling
from dyntree_plugin.tree.shape import TreeShape

if TYPE_CHECKING:
    from dyntree_plugin.tree.plan import TreePlan

NAMESPACE = "dyntree"
"""The key of our options in vLLM's ``additional_config``, and the name of the flag."""

Switch = Literal["on", "off"]

# Draws use places up on tokens of little chance.
DRAWN_CHILDREN = 16

ADAPTIVE_DEPTH = 16


def default_shape(node_budget: int) -> tuple[int, int, int]:
    """Depth, width and children that suit a budget.

    From a sweep on the embedded pair with learned values: with 16 and 64 nodes, more of any gains
    less than 3 % accepted tokens at temperature 1, and depth costs draft forwards.
    """
    root = math.ceil(math.sqrt(node_budget))
    depth = min(max(round(2 * math.log2(node_budget)), 1), node_budget)
    return depth, min(root, 32), min(max(root, 2), 8)


MOST_NODES = 1024
MOST_DEPTH = MOST_CHILDREN = 64


class DynTreeOptions(BaseModel):
    """What a user may set. Bounds that depend on the engine are checked by `resolve`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node_budget: int | None = Field(
        default=None,
        ge=1,
        le=MOST_NODES,
        description="Most nodes in one request's tree, and so the draft tokens that the target "
        "verifies per step. At most num_speculative_tokens.",
        json_schema_extra={"derived": "num_speculative_tokens"},
    )
    budget: Budget | None = Field(
        default=None,
        description="adaptive verifies, of all trees of a step together, the nodes that make the "
        "most tokens per second: it measures at start-up what rows cost (4 s at most, about), "
        "follows that while serving, and ends drafting that cannot pay. fixed verifies every tree "
        "that was grown. The output is the same either way.",
        json_schema_extra={
            "derived": "adaptive with growth topk and rule match; else fixed, the only one allowed"
        },
    )
    max_depth: int | None = Field(
        default=None,
        ge=1,
        le=MOST_DEPTH,
        description="Depth of the deepest node: the most draft tokens that one step can accept, "
        "and the most draft forwards that it makes. At most node_budget.",
        json_schema_extra={
            "derived": f"node_budget, at most {ADAPTIVE_DEPTH}, where an adaptive budget ends "
            "drafting by itself: on CUDA, and on a CPU with one rank; else 2 log2(node_budget), "
            "rounded: 8 for 16, 12 for 64"
        },
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Frontier nodes that each draft forward expands per request.",
        json_schema_extra={"derived": "square root of node_budget, at most 32"},
    )
    children: int | None = Field(
        default=None,
        ge=1,
        le=MOST_CHILDREN,
        description="Candidate children kept of each expanded node. 1 makes the tree a chain.",
        json_schema_extra={
            "derived": "square root of node_budget, 2 to 8; "
            f"{DRAWN_CHILDREN} for growths that draw by value"
        },
    )
    coupling: Switch = Field(
        default="on",
        description="At temperature > 0, rank candidates with the target sampler's own noise, so "
        "that the tree follows the very draw that the target will make. The output is the same "
        "either way; off is for comparison.",
    )

    calibration: Switch = Field(
        default="on",
        description="Learn while serving how often the target takes a candidate of a given draft "
        "score, and value nodes by that. The output is the same either way; off takes the draft's "
        "probability.",
    )
    min_value: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="For growth topk: the least value of a node, the estimated chance that its "
        "whole path is accepted. Nodes of less are not verified, and on the CPU drafting stops "
        "where none are left to expand. Pays where the target's cost grows with its rows.",
        json_schema_extra={"derived": "none: trees fill their budget"},
    )
    growth: GrowthName = Field(
        default="topk",
        description="How trees grow. topk is for serving; the papers' ways are for comparison: "
        "DySpec's Algorithm 1, its fixed and a dynamic threshold, SpecInfer's expansion, Sequoia's "
        "static tree, a chain.",
    )
    sampling: Sampling | None = Field(
        default=None,
        description="How children come from the draft: its best tokens, or draws with or without "
        "replacement.",
        json_schema_extra={"derived": "the growth's own"},
    )
    rule: Rule | None = Field(
        default=None,
        description="How trees are verified. match is exact with every growth and gives the very "
        "tokens of decoding without speculation; the papers' rules give its distribution, and "
        "store the draft's distributions (node_budget + 1 times the vocabulary, in fp32, per "
        "request slot). A pair that would be biased is refused.",
        json_schema_extra={"derived": "what fits the sampling"},
    )
    threshold: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="For growth threshold: the least slot value of a node.",
        json_schema_extra={"derived": "1 / node_budget"},
    )
    expansion: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_DEPTH,
        description="For growth expansion: children of every node at depth 0, 1, …",
        json_schema_extra={"derived": "none; growth expansion needs it"},
    )
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_CHILDREN,
        description="For growth sequoia: how often the target takes a node's first child, its "
        "second, …; `python -m benchmarks.acceptance.positional` measures it.",
        json_schema_extra={"derived": "none; growth sequoia needs it"},
    )

    kernel_table: str | None = Field(
        default=None,
        description="On CUDA: what `python -m benchmarks.kernels` measured on such a GPU. Of "
        "the kernels that can carry the trees it chooses the fastest at the nearest shape.",
        json_schema_extra={"derived": "none: rules choose the kernel"},
    )

    @field_validator("expansion", "acceptance", mode="before")
    @classmethod
    def _tuple_from_list(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("coupling", "calibration", mode="before")
    @classmethod
    def _switch_from_bool(cls, value: object) -> object:
        # YAML reads a bare `on` or `off` in a --config file as a boolean.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @classmethod
    def of(cls, additional_config: object) -> DynTreeOptions | None:
        """The options in an engine's ``additional_config``, or None where it asks for no tree.

        Raises:
            ValueError: as `parse`, and for a key that is almost ours.
        """
        if not isinstance(additional_config, Mapping):
            return None
        for key in additional_config:
            if key != NAMESPACE and _nearly_ours(str(key)):
                raise ValueError(
                    f"additional_config key {key!r} is not known: did you mean {NAMESPACE!r}? "
                    "Without that key there are no trees"
                )
        return cls.parse(additional_config[NAMESPACE]) if NAMESPACE in additional_config else None

    @classmethod
    def parse(cls, value: object) -> DynTreeOptions:
        """Validates what stands under ``additional_config["dyntree"]``.

        Raises:
            ValueError: naming each wrong option, its value and what is allowed.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{NAMESPACE}={value!r} must be a JSON object of options, for example "
                f'{{"node_budget": 16}}; the options are {_known_options()}'
            )
        given = {str(name): each for name, each in value.items()}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            wrong = dict.fromkeys(str(e["loc"][0]) for e in error.errors())
            raise ValueError("; ".join(_explain(name, given[name]) for name in wrong)) from None

    def resolve(self, num_speculative_tokens: int, *, drafting_ends: bool = True) -> TreePlan:
        """Fills in every default for an engine with `num_speculative_tokens`.

        ``drafting_ends``: whether an adaptive budget can end drafting on this engine.

        Raises:
            ValueError: naming the options that do not fit this engine or each other.
        """
        slots = num_speculative_tokens
        node_budget = slots if self.node_budget is None else self.node_budget
        if node_budget > MOST_NODES:
            raise ValueError(
                f"num_speculative_tokens={slots} is more than the {MOST_NODES} nodes that a tree "
                f"may have: lower it, or set {NAMESPACE}.node_budget to at most {MOST_NODES}"
            )
        if node_budget > slots:
            raise ValueError(
                f"{NAMESPACE}.node_budget={node_budget} exceeds num_speculative_tokens={slots}: "
                f"lower it to at most {slots}, or raise num_speculative_tokens in "
                f"--speculative-config to at least {node_budget}"
            )
        if self.max_depth is not None and self.max_depth > node_budget:
            raise ValueError(
                f"{NAMESPACE}.max_depth={self.max_depth} cannot be reached with "
                f"{NAMESPACE}.node_budget={node_budget}: lower max_depth to at most {node_budget}, "
                "or raise node_budget"
            )
        depth, width, children = default_shape(node_budget)
        budget = self.budget or self._default_budget()
        if budget == "adaptive" and drafting_ends:
            # Depth that does not pay is not drafted.
            depth = min(node_budget, ADAPTIVE_DEPTH)
        if self.expansion is not None:
            depth = len(self.expansion)
        if self.growth in ("dyspec", "threshold", "dynamic_threshold"):
            children = DRAWN_CHILDREN
        shape = TreeShape(
            node_budget,
            self.max_depth or depth,
            self.width or width,
            self.children or children,
            self.coupling == "on",
        )
        try:
            return self._plan(shape, budget)
        except ValueError as error:
            raise ValueError(f"{NAMESPACE}.{error}") from None

    def without_effect(self, plan: TreePlan) -> Iterator[str]:
        """Each option that was given and that the plan made of it does not read, and why."""
        from dyntree_plugin.tree.growth import SHAPE_READ

        growth = plan.growth.name
        for name in ("max_depth", "width", "children"):
            value = getattr(self, name)
            if value is not None and name not in SHAPE_READ[growth]:
                yield (
                    f"{NAMESPACE}.{name}={value} has no effect with growth={growth}: leave it out"
                )
        if self._asked_for("coupling") and not plan.coupled:
            yield (
                f"{NAMESPACE}.coupling='on' has no effect with rule={plan.rule}, which takes "
                "children to be independent of the target's draws: leave it out, or use rule=match"
            )
        if self._asked_for("calibration") and not plan.calibrated:
            yield (
                f"{NAMESPACE}.calibration='on' has no effect with sampling="
                f"{plan.growing.sampling}: the values of drawn children are the draft's "
                "probabilities; leave it out"
            )

    def _asked_for(self, switch: str) -> bool:
        return switch in self.model_fields_set and getattr(self, switch) == "on"

    def _default_budget(self) -> Budget:
        """adaptive wherever a plan may have it."""
        return "adaptive" if self.growth == "topk" and self.rule in (None, "match") else "fixed"

    def _plan(self, shape: TreeShape, budget: Budget) -> TreePlan:
        # With these torch is loaded, which a vLLM without dyntree options need not do for us.
        from dyntree_plugin.tree.growth import GrowthConfig, plan_growth
        from dyntree_plugin.tree.papers.rules import default_rule
        from dyntree_plugin.tree.plan import TreePlan

        growth = GrowthConfig(
            self.growth,
            self.min_value,
            self.threshold,
            self.expansion,
            self.acceptance,
            self.sampling,
        )
        growing = plan_growth(growth, shape)
        # Some growths stop before max_depth, whatever the draft says.
        shape = dataclasses.replace(shape, max_depth=len(growing.widths) + 1)
        rule = self.rule or default_rule(growing.sampling)
        return TreePlan(shape, growth, rule, self.calibration == "on", budget)


def merge_options(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The options of both; the same option with two different values is a ValueError."""
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            raise ValueError(
                f"{NAMESPACE}.{name} is given twice, as {first[name]!r} and as {second[name]!r}: "
                "give it once"
            )
    return {**first, **second}


def help_text() -> str:
    """The help of the flag, with every option."""
    lines = [
        f"- {name} ({_allowed(field)}; default {_default(field)}): {field.description}"
        for name, field in DynTreeOptions.model_fields.items()
    ]
    return (
        "Speculate with a dynamic token tree. Takes a JSON object of options, {} for the "
        "defaults, and needs --speculative-config with method draft_model.\n\n" + "\n".join(lines)
    )


def markdown_table() -> str:
    """The options as a Markdown table, for the README."""
    rows = [
        f"| `{name}` | {_allowed(field)} | {_default(field)} | {field.description} |"
        for name, field in DynTreeOptions.model_fields.items()
    ]
    return "\n".join(["| option | allowed | default | meaning |", "|---|---|---|---|", *rows])


def _nearly_ours(key: str) -> bool:
    """Whether a key is ours but for its case, a separator, or a letter or two out of place."""
    return bool(difflib.get_close_matches(key.lower(), [NAMESPACE], cutoff=0.85))


def _known_options() -> str:
    return ", ".join(DynTreeOptions.model_fields)


def _allowed(field: FieldInfo) -> str:
    type_ = next((t for t in get_args(field.annotation) if get_origin(t)), field.annotation)
    if get_origin(type_) is Literal:
        return " or ".join(str(value) for value in get_args(type_))
    if get_origin(type_) is tuple:
        of_what = "integers >= 1" if int in get_args(get_args(type_)[0]) else "numbers from 0 to 1"
        most = next(m.max_length for m in field.metadata if hasattr(m, "max_length"))
        return f"a list of 1 to {most} {of_what}"
    if str in get_args(field.annotation):
        return "the path of a file"
    if type_ is float or float in get_args(type_):
        return "a number above 0, at most 1"
    low = next(m.ge for m in field.metadata if hasattr(m, "ge"))
    high = next(m.le for m in field.metadata if hasattr(m, "le"))
    return f"an integer from {low} to {high}"


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra["derived"] if isinstance(extra, dict) else field.default)


def _explain(name: str, value: object) -> str:
    field = DynTreeOptions.model_fields.get(name)
    if field is None:
        close = difflib.get_close_matches(name, DynTreeOptions.model_fields, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return (
            f"{NAMESPACE}.{name}={value!r} is not an option: {hint}"
            f"The options are {_known_options()}"
        )
    return f"{NAMESPACE}.{name}={value!r} must be {_allowed(field)}"
