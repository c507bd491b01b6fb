"""A block draft grows the same trees in graphs as eagerly.

A graph is replaced by a call that runs again, as in `replays`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_model import Block, Draft, Masked, MaskedHead
from drafted_steps import (
    Make,
    differing,
)

from dyntree_plugin.engine.drafts.block import BlockDraft
from dyntree_plugin.engine.step.rows import TreeRows
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.plan import TreePlan

OPTIONS = {"max_depth": 4, "width": 2, "children": 3, "node_budget": 7}
PLAN = DynTreeOptions(**OPTIONS, budget="adaptive", lookup="off").resolve(5, block=True)
OF_BOTH = DynTreeOptions(**OPTIONS).resolve(5, block=True)
SHALLOW = DynTreeOptions(max_depth=1, node_budget=3, lookup="off").resolve(5, block=True)
PLANS = [PLAN, OF_BOTH, SHALLOW]
MODELS = [Block, Masked, MaskedHead]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_one_graph_grows_the_trees_of_eager_drafting(
    draftings: Make, plan: TreePlan, model: type[Draft]
) -> None:
    made = draftings(plan=plan, model=model)
    assert differing(made) == []
    assert made[0].trees.depths.max() == plan.shape.max_depth
    replayed = made[1].drafting
    assert replayed.whole is not None
    assert not replayed.runs


Change = Callable[[pytest.MonkeyPatch, BlockDraft], None]


def not_received(patch: pytest.MonkeyPatch, block: BlockDraft) -> None:
    patch.setattr(block, "receive", lambda emitted, target: None)


def deeper(patch: pytest.MonkeyPatch, block: BlockDraft) -> None:
    """Give nodes the logits of the next position."""
    stock = block.forward

    def forward(rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        rows.positions.add_(1)
        return stock(rows, requests, first)

    patch.setattr(block, "forward", forward)


def stale(patch: pytest.MonkeyPatch, block: BlockDraft) -> None:
    """Keep nothing of what the last emitted token follows."""
    stock = block.reader._block.keep

    def keep(states: torch.Tensor, positions: torch.Tensor, slots: Any) -> None:
        last = block._memory.root_positions - 1
        slots = slots.masked_fill(torch.isin(positions, last), -1)
        stock(states, positions, slots)

    patch.setattr(block.reader._block, "keep", keep)


def causal(patch: pytest.MonkeyPatch, block: BlockDraft) -> None:
    patch.setattr(block.reader._block, "causal", True)


def other_masks(patch: pytest.MonkeyPatch, block: BlockDraft) -> None:
    """Read an ordinary token in place of masks."""
    text: Any = block.reader
    patch.setattr(text, "_masks", text._masks._replace(token=0))


CHANGES = [
    *((Block, change) for change in (not_received, deeper, stale, causal)),
    *((Masked, change) for change in (deeper, other_masks)),
    *((MaskedHead, change) for change in (not_received, deeper, other_masks)),
]


@pytest.mark.parametrize(("model", "change"), CHANGES)
def test_what_a_block_reads_is_seen(
    model: type[Draft], change: Change, draftings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = draftings(model=model)
    change(monkeypatch, made[1].source)  # type: ignore[arg-type]
    assert differing(made) != []
