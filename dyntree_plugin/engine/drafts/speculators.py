"""The speculator that vLLM loads and calls for each kind of draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dyntree_plugin.engine.drafts.block import BlockSpeculator, CandidateSpeculator
from dyntree_plugin.engine.drafts.draft_model import TreeSpeculator
from dyntree_plugin.engine.drafts.head import ContextSpeculator, HeadSpeculator
from dyntree_plugin.engine.drafts.look_up import LookUpSpeculator
from dyntree_plugin.engine.drafts.masked import PARDSpeculator, PEagleSpeculator
from dyntree_plugin.engine.drafts.selecting import SelectingSpeculator
from dyntree_plugin.tree.plan import TreePlan

Serves = Callable[[TreePlan, Any], bool]
"""Says whether a speculator is that of a plan and of vLLM's ``SpeculativeConfig``."""


def _in_blocks(method: str) -> Serves:
    return lambda plan, speculation: bool(plan.shape.block) and speculation.method == method


def _scores_pairs(plan: TreePlan, speculation: Any) -> bool:
    architectures = speculation.draft_model_config.architectures
    return bool(plan.shape.block) and "DFlash2DraftModel" in architectures


def _selects(speculation: Any) -> bool:
    return bool(getattr(speculation.draft_model_config.hf_config, "index_topk", None))


SPECULATORS: tuple[tuple[type[Any], Serves], ...] = (
    (LookUpSpeculator, lambda plan, _: not plan.has_draft),
    (PARDSpeculator, _in_blocks("draft_model")),
    (PEagleSpeculator, _in_blocks("eagle3")),
    (CandidateSpeculator, _scores_pairs),
    (BlockSpeculator, lambda plan, _: bool(plan.shape.block)),
    (TreeSpeculator, lambda plan, _: not plan.shape.head),
    (ContextSpeculator, lambda _, speculation: speculation.use_gemma4_mtp()),
    (SelectingSpeculator, lambda _, speculation: _selects(speculation)),
    (HeadSpeculator, lambda *_: True),
)
"""The first that serves a configuration drafts for it."""


def speculator_for(plan: TreePlan, speculation: Any) -> type[Any]:
    """Return the class of vLLM's speculator for a plan and a ``SpeculativeConfig``."""
    return next(each for each, serves in SPECULATORS if serves(plan, speculation))
