"""The kinds of drafts, and what vLLM loads and calls for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dyntree_plugin.engine.drafts.block import BlockSpeculator, CandidateSpeculator
from dyntree_plugin.engine.drafts.draft_model import TreeSpeculator
from dyntree_plugin.engine.drafts.head import ContextSpeculator, HeadSpeculator
from dyntree_plugin.engine.drafts.look_up import LookUpSpeculator
from dyntree_plugin.engine.drafts.masked import PARDSpeculator, PEagleSpeculator
from dyntree_plugin.engine.drafts.selecting import SelectingSpeculator
from dyntree_plugin.tree.plan import TreePlan


class Drafter(NamedTuple):
    """A kind of draft. ``serves`` takes the plan and vLLM's ``SpeculativeConfig``."""

    speculator: type[Any]
    serves: Callable[[TreePlan, Any], bool]


def _in_blocks(method: str) -> Callable[[TreePlan, Any], bool]:
    return lambda plan, speculation: bool(plan.shape.block) and speculation.method == method


def _scores_pairs(plan: TreePlan, speculation: Any) -> bool:
    architectures = speculation.draft_model_config.architectures
    return bool(plan.shape.block) and "DFlash2DraftModel" in architectures


def _selects(speculation: Any) -> bool:
    return bool(getattr(speculation.draft_model_config.hf_config, "index_topk", None))


DRAFTERS = (
    Drafter(LookUpSpeculator, lambda plan, _: not plan.has_draft),
    Drafter(PARDSpeculator, _in_blocks("draft_model")),
    Drafter(PEagleSpeculator, _in_blocks("eagle3")),
    Drafter(CandidateSpeculator, _scores_pairs),
    Drafter(BlockSpeculator, lambda plan, _: bool(plan.shape.block)),
    Drafter(TreeSpeculator, lambda plan, _: not plan.shape.head),
    Drafter(ContextSpeculator, lambda _, speculation: speculation.use_gemma4_mtp()),
    Drafter(SelectingSpeculator, lambda _, speculation: _selects(speculation)),
    Drafter(HeadSpeculator, lambda *_: True),
)
"""The first that serves a configuration drafts for it."""


def drafter_for(plan: TreePlan, speculation: Any) -> type[Any]:
    """Return the class of vLLM's speculator for a plan and a ``SpeculativeConfig``."""
    return next(each.speculator for each in DRAFTERS if each.serves(plan, speculation))
