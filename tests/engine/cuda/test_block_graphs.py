"""A block draft grows the same trees in graphs as eagerly.

A graph is replaced by a call that runs again, as in `replays`. If kernels are interpreted, CUDA's
kernels draft in the graphs and are compared with tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_model import LONGEST, Block, Draft, Masked, MaskedHead
from drafted_steps import (
    INTERPRETED,
    Drafting,
    Make,
    differing,
    makes,
    packed,
)
from interpreted import passes_interpreted

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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_interpreted_kernels_grow_the_trees_of_tensors(
    by_kernels: Make, plan: TreePlan, model: type[Draft]
) -> None:
    assert differing(by_kernels(plan=plan, model=model), steps=5) == []


@pytest.mark.parametrize("change", [not_received, deeper])
def test_interpreted_kernels_that_read_other_logits_are_seen(
    change: Change, by_kernels: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = by_kernels()
    change(monkeypatch, made[1].source)  # type: ignore[arg-type]
    assert differing(made, steps=3) != []


@torch.inference_mode()
def _slots_of_filling(made: Drafting, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the slots that a graph for four requests gives the rows of a fourth that is none."""
    given: list[list[int]] = []
    stock = made.model.run

    def run(ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any) -> torch.Tensor:
        if len(ids) == 4 * 5:
            given.append(slots[0, 3 * 5 :].tolist())
        found: torch.Tensor = stock(ids, positions, metadata, slots)
        return found

    monkeypatch.setattr(made.model, "run", run)
    made.memory.root_positions[:] = LONGEST // 2
    player = made.player(packed([2, 0, 5]))
    player.root()
    player.finish(0)
    return {*given[-1]}


def test_interpreted_kernels_write_nothing_for_what_only_fills_a_batch_up(
    by_kernels: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: rows by tensors, which know no filling, have slots there."""
    of_kernels = by_kernels()[1]
    assert _slots_of_filling(of_kernels, monkeypatch) == {-1}
    of_tensors = makes(monkeypatch, PLAN)()[1]
    assert min(_slots_of_filling(of_tensors, monkeypatch)) >= 0


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this process runs the kernels itself")
def test_the_kernels_do_what_the_tensors_do() -> None:
    passes_interpreted(__file__, 12)
