"""The options of the plugin. The ``--dyntree`` flag, its help and the tables follow from them.

The names of growths and rules come from `tree.registry`, which loads torch, and so only if needed.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from dyntree_plugin.options.methods import DRAWN, draws_chains, kind_of_draft
from dyntree_plugin.options.shape import (
    BLOCK_NODES,
    DRAWN_CHILDREN,
    DRAWN_DEEP,
    LOOK_UP_DEPTH,
    MOST_FORWARDS,
    shape_of,
)
from dyntree_plugin.options.text import allowed, specs
from dyntree_plugin.tree.shape import LEAST_DRAWN_TREE, Budget, Exactness, Sampling, TreeShape

if TYPE_CHECKING:
    from dyntree_plugin.tree.plan import TreePlan

NAMESPACE = "dyntree"
"""The key of our options in vLLM's ``additional_config``, and the name of the flag."""

Switch = Literal["on", "off"]

MOST_NODES = 1024
MOST_DEPTH = MOST_CHILDREN = 64
MOST_FURTHER_DRAFTS = 3


class DynTreeOptions(BaseModel):
    """The settings that a user may give. `resolve` checks the bounds that depend on the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node_budget: int | None = Field(
        default=None,
        ge=1,
        le=MOST_NODES,
        description="Most nodes in one request's tree: the draft tokens that the target verifies "
        "in a step. At most num_speculative_tokens, unless a block draft (method dflash or dspark, "
        "or parallel_drafting) has that as the length of its block.",
        json_schema_extra={
            "derived": f"num_speculative_tokens; with a block draft at least {BLOCK_NODES}"
        },
    )
    budget: Budget | None = Field(
        default=None,
        description="adaptive chooses for each step the number of nodes to verify and of draft "
        "forwards that should make the most tokens per second, by costs that are measured at "
        "start-up and corrected while serving. fixed verifies every tree whole.",
        json_schema_extra={
            "derived": "adaptive with growth topk and rule match; else only fixed is allowed"
        },
    )
    max_depth: int | None = Field(
        default=None,
        ge=1,
        le=MOST_DEPTH,
        description="Largest depth of a node: the most draft tokens that one step can accept. At "
        "most node_budget, and with a block draft at most num_speculative_tokens.",
        json_schema_extra={
            "derived": f"node_budget, at most {LOOK_UP_DEPTH}, with look-up; else max_forwards; "
            "the most with a block draft"
        },
    )
    max_forwards: int | None = Field(
        default=None,
        ge=1,
        le=MOST_DEPTH,
        description="Most draft forwards of a step, the catch-up included. Each adds a level to "
        "the draft's candidates; those of look-up need none. At most max_depth.",
        json_schema_extra={
            "derived": f"node_budget, at most {MOST_FORWARDS}, with an adaptive budget, or "
            f"with exactness distribution and up to {DRAWN_DEEP} nodes; else 2 log2(node_budget), "
            "rounded: 8 for 16, 12 for 64; without look-up, max_depth if that is given"
        },
    )
    lookup: Switch | None = Field(
        default=None,
        description="For growth topk: also propose what followed the request's last tokens earlier "
        "in its text, without a draft forward. With method ngram or ngram_gpu all candidates come "
        "from there.",
        json_schema_extra={"derived": "on with growth topk; else only off is allowed"},
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Nodes of each request that one draft forward expands.",
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
        description="At temperature > 0, rank candidates with the target sampler's noise, so that "
        "the tree likely holds the token that the target will draw; off is for comparison.",
    )

    calibration: Switch = Field(
        default="on",
        description="Learn while serving how often the target takes a candidate of a given draft "
        "score, and value nodes by that; off values them by the draft's probability.",
    )
    exactness: Exactness | None = Field(
        default=None,
        description="What output has in common with that without speculation: its tokens, unless "
        "rounding decides; at a temperature above 0 its distribution alone; or every bit, whatever "
        "was drafted and batched. distribution is for growth topk: such a request gets a chain "
        f"that is drawn from the draft, or, with {LEAST_DRAWN_TREE} or more nodes, a drawn tree. "
        "Of each distribution of the draft the best tokens count: 1,024 on a CPU, 64 on CUDA. bits "
        "is not for recurrent layers, and on CUDA needs VLLM_BATCH_INVARIANT=1.",
        json_schema_extra={"derived": f"tokens, or with {DRAWN} distribution where it is served"},
    )
    min_value: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="For growth topk: nodes of a smaller value, the estimated chance that the "
        "whole path is accepted, are not verified. On a CPU, drafting stops if none is left to "
        "expand. This pays if the target's cost grows with its rows.",
        json_schema_extra={"derived": "none: trees fill their budget"},
    )
    drafts: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_FURTHER_DRAFTS,
        description="Further draft models. Trees grow from the mixture of all distributions; "
        "growth expansion merges a tree of each. Each must meet the conditions of the first, and "
        "runs in every draft forward.",
        json_schema_extra={"derived": "none: one draft"},
    )
    growth: str = Field(
        default="topk",
        description="How trees grow. All growths but topk are for comparison.",
    )
    sampling: Sampling | None = Field(
        default=None,
        description="How children come from the draft: its best tokens, or draws with or without "
        "replacement.",
        json_schema_extra={"derived": "follows from the growth"},
    )
    rule: str | None = Field(
        default=None,
        description="How trees are verified. All rules but match give only the distribution of "
        "decoding without speculation, and store the draft's distributions (node_budget + 1 times "
        "the vocabulary, in fp32, for each of max_num_seqs). A rule that is biased with the growth "
        "is refused.",
        json_schema_extra={"derived": "follows from the sampling"},
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
        "second, …; `python -m benchmarks.positional` measures it.",
        json_schema_extra={"derived": "none; growth sequoia needs it"},
    )
    attention: Literal["auto", "cascade", "flashinfer", "triton"] = Field(
        default="auto",
        description="On CUDA: the kernel of the target's trees. flashinfer is compiled when first "
        "asked for. auto takes it if it is compiled, and the fastest in `kernel_table`. cascade "
        "reads the context with vLLM's FlashAttention 3 or 4; it has run on no GPU.",
    )
    kernel_table: str | None = Field(
        default=None,
        description="On CUDA: the result file of `python -m benchmarks.kernels` on such a GPU. The "
        "kernel that takes the least time per step at the nearest shape is used.",
        json_schema_extra={"derived": "the package's, of an H200; on other GPUs Triton's kernel"},
    )

    @field_validator("expansion", "acceptance", "drafts", mode="before")
    @classmethod
    def _tuple_from_list(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("growth", "rule")
    @classmethod
    def _registered(cls, value: str | None, info: ValidationInfo) -> str | None:
        known = specs(str(info.field_name))
        if value is not None and value not in known:
            raise ValueError(f"must be {' or '.join(known)}")
        return value

    @field_validator("coupling", "calibration", "lookup", mode="before")
    @classmethod
    def _switch_from_bool(cls, value: object) -> object:
        # YAML reads a bare `on` or `off` in a --config file as a boolean.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @classmethod
    def of(cls, additional_config: object) -> DynTreeOptions | None:
        """Return the options in an engine's ``additional_config``; None if there are none.

        Raises:
            ValueError: as `parse`, and for a key that is probably a misspelling.
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
        """Validate the value of ``additional_config["dyntree"]``.

        Raises:
            ValueError: naming each wrong option, its value and what is allowed.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{NAMESPACE}={value!r} must be a JSON object of options, like "
                f'{{"node_budget": 16}}; the options are {_known_options()}'
            )
        given = {str(name): each for name, each in value.items()}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            wrong = dict.fromkeys(str(e["loc"][0]) for e in error.errors())
            raise ValueError("; ".join(_explain(name, given[name]) for name in wrong)) from None

    def plan_for(self, speculation: Any) -> TreePlan:
        """Do as `resolve` for an engine with this ``SpeculativeConfig`` of vLLM's."""
        slots, draft = speculation.num_speculative_tokens, kind_of_draft(speculation)
        plan = self.resolve(slots, **draft)
        if self.exactness is None and plan.may_draw and draws_chains(speculation):
            return self.model_copy(update={"exactness": "distribution"}).resolve(slots, **draft)
        return plan

    def resolve(
        self, slots: int, *, draft: bool = True, head: bool = False, block: bool = False
    ) -> TreePlan:
        """Fill in every default for an engine with num_speculative_tokens = ``slots``.

        ``draft``: there is a draft, such as a ``head`` of the target, or of a ``block`` so long.

        Raises:
            ValueError: naming the options that do not fit this engine or each other.
        """
        node_budget = self.node_budget or (max(slots, BLOCK_NODES) if block else slots)
        if node_budget > MOST_NODES:
            raise ValueError(
                f"num_speculative_tokens={slots} is more than the {MOST_NODES} nodes that a tree "
                f"may have: lower it, or set {NAMESPACE}.node_budget to at most {MOST_NODES}"
            )
        if node_budget > slots and not block:
            raise ValueError(
                f"{NAMESPACE}.node_budget={node_budget} exceeds num_speculative_tokens={slots}: "
                f"lower it to at most {slots}, or raise num_speculative_tokens in "
                f"--speculative-config to at least {node_budget}"
            )
        budget = self.budget or self._default_budget()
        try:
            shape = shape_of(
                self.model_dump(), node_budget, budget, draft=draft, head=head, block=slots * block
            )
            return self._plan(shape, budget)
        except ValueError as error:
            raise ValueError(f"{NAMESPACE}.{error}") from None

    def without_effect(self, plan: TreePlan) -> Iterator[str]:
        """Yield a message for each option that was given and that the plan does not read."""
        growth = plan.growth.name
        for name in ("max_depth", "max_forwards", "width", "children"):
            value = getattr(self, name)
            if value is None:
                continue
            given = f"{NAMESPACE}.{name}={value} has no effect"
            if name not in specs("growth")[growth].reads:
                yield f"{given} with growth={growth}: leave it out"
            elif not plan.has_draft and name != "max_depth":
                yield f"{given} without a draft model: leave it out"
            elif plan.shape.block and name == "max_forwards":
                yield f"{given} with a block draft, which makes one forward: leave it out"
            elif name == "max_depth" and not plan.shape.grafts and self._forwards_limit(value):
                yield (
                    f"{given} with max_forwards={self.max_forwards} and lookup=off: leave it out"
                )
        if self._asked_for("coupling") and not plan.coupled:
            other = "exactness=distribution" if plan.draws else f"rule={plan.rule}"
            yield (
                f"{NAMESPACE}.coupling='on' has no effect with {other}, which assumes that "
                "children and the target's draws are independent: leave it out, or use match"
            )
        if self._asked_for("calibration") and not plan.calibrated:
            yield (
                f"{NAMESPACE}.calibration='on' has no effect with sampling="
                f"{plan.growing.sampling}: the values of drawn children are the draft's "
                "probabilities; leave it out"
            )

    def _forwards_limit(self, depth: int) -> bool:
        return self.max_forwards is not None and self.max_forwards < depth

    def _asked_for(self, switch: str) -> bool:
        return switch in self.model_fields_set and getattr(self, switch) == "on"

    def _default_budget(self) -> Budget:
        """Return "adaptive" if the plan allows it, else "fixed"."""
        reads_draws = self.rule is not None and specs("rule")[self.rule].drawn is not None
        return "adaptive" if specs("growth")[self.growth].ordered and not reads_draws else "fixed"

    def _growth_parameter(self) -> Any:
        """Return the value of the option that only the chosen growth has; None without one.

        Raises:
            ValueError: if such an option of another growth is given.
        """
        growths = specs("growth")
        parameter = growths[self.growth].parameter
        for spec in growths.values():
            name = spec.parameter
            if name and name != parameter and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} is for growth={spec.name}, not {self.growth}"
                )
        return getattr(self, parameter) if parameter else None

    def _plan(self, shape: TreeShape, budget: Budget) -> TreePlan:
        from dyntree_plugin.tree.growth import GrowthConfig
        from dyntree_plugin.tree.pairs import default_rule
        from dyntree_plugin.tree.plan import TreePlan
        from dyntree_plugin.tree.registry import plan_growth

        growth = GrowthConfig(self.growth, self._growth_parameter(), self.sampling)
        growing = plan_growth(growth, shape)
        if not shape.grafts:  # Some growths stop before max_depth, whatever the draft says.
            shape = dataclasses.replace(shape, max_depth=len(growing.widths) + 1)
        rule, exactness = self.rule or default_rule(growing.sampling), self.exactness or "tokens"
        return TreePlan(shape, growth, rule, self.calibration == "on", budget, exactness)


def _nearly_ours(key: str) -> bool:
    """Return whether a key is probably a misspelling of `NAMESPACE`."""
    return bool(difflib.get_close_matches(key.lower(), [NAMESPACE], cutoff=0.85))


def _known_options() -> str:
    return ", ".join(DynTreeOptions.model_fields)


def _explain(name: str, value: object) -> str:
    field = DynTreeOptions.model_fields.get(name)
    if field is None:
        close = difflib.get_close_matches(name, DynTreeOptions.model_fields, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return (
            f"{NAMESPACE}.{name}={value!r} is not an option: {hint}"
            f"The options are {_known_options()}"
        )
    return f"{NAMESPACE}.{name}={value!r} must be {allowed(name, field)}"
