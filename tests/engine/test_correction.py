"""The records of what a draft said belong to one request and one tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dyntree_kernels.contracts import Walked, room_for
from dyntree_kernels.cpu.residuals import CompiledResiduals
from dyntree_kernels.residuals import Texts
from dyntree_plugin.engine.step.correction import DraftCorrection
from dyntree_plugin.engine.step.requests import COLUMNS, PADDING, Requests
from dyntree_plugin.options.options import DynTreeOptions

SLOTS, VOCABULARY, PROMPT, ROOT = 4, 32, 5, 8
PLAN = DynTreeOptions.parse({"adapt": "on", "node_budget": 4}).resolve(4)


@pytest.fixture
def correction() -> DraftCorrection:
    texts = Texts(torch.arange(SLOTS), torch.full((SLOTS,), ROOT + 1, dtype=torch.int32))
    return DraftCorrection(CompiledResiduals, PLAN, texts, VOCABULARY)


def packed(*slots: int) -> torch.Tensor:
    """Return requests of one row of logits each."""
    found = torch.full((len(slots), COLUMNS), PADDING)
    for row, slot in enumerate(slots):
        if slot >= 0:
            found[row] = torch.tensor([slot, row, 0, row, PROMPT, 0, 0, 0, 0])
    return found


def draft(correction: DraftCorrection, *slots: int) -> None:
    logits = torch.randn(len(slots), VOCABULARY, generator=torch.Generator().manual_seed(0))
    correction.roots(Requests(packed(*slots), SLOTS), logits)


def verified(requests: int, position: int = ROOT) -> Walked:
    """Return a walk that accepted nothing."""
    shape = PLAN.shape
    found = room_for(requests, shape.node_budget, shape.max_depth, torch.device("cpu"), ranked=True)
    found.path.fill_(-1)
    found.tokens.zero_()
    found.positions.fill_(position)
    return found


def learn(correction: DraftCorrection, *slots: int, **given: Any) -> list[int]:
    """Learn from these requests; return the buckets that have learned something."""
    logits = torch.randn(len(slots), VOCABULARY, generator=torch.Generator().manual_seed(1))
    correction.learn(packed(*slots), logits, verified(len(slots), **given))
    return (correction.residuals.table.tokens >= 0).any(1).nonzero()[:, 0].tolist()


def test_a_root_teaches_without_an_accepted_node(correction: DraftCorrection) -> None:
    draft(correction, 2, 0)
    assert learn(correction, 0, 2) == [0, 2]


def test_a_slot_that_a_new_request_took_teaches_nothing(correction: DraftCorrection) -> None:
    draft(correction, 2, 0)
    correction.clear(torch.tensor([2]))
    assert learn(correction, 0, 2) == [0]


def test_a_step_that_drafted_nothing_teaches_nothing(correction: DraftCorrection) -> None:
    draft(correction, 2, 0)
    assert learn(correction, 0, 2, position=ROOT + 1) == []
    assert learn(correction, 0, 2) == []


def test_requests_without_a_tree_teach_nothing(correction: DraftCorrection) -> None:
    draft(correction, 1)
    assert learn(correction, 3, -1, 1) == [1]


def test_padding_records_nothing(correction: DraftCorrection) -> None:
    draft(correction, -1, 3, -1)
    assert (correction.residuals.expansions.roots >= 0).tolist() == [False, False, False, True]


def test_tokens_that_a_head_lacks_are_not_learned(correction: DraftCorrection) -> None:
    known = torch.arange(0, VOCABULARY, 4)
    correction.limit(known)
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, known] = 0.0
    correction.roots(Requests(packed(1), SLOTS), logits)
    assert learn(correction, 1) == [1]
    learned = correction.residuals.table.tokens[1]
    assert set(learned[learned >= 0].tolist()) <= set(known.tolist())


def test_a_reset_forgets_all(correction: DraftCorrection) -> None:
    draft(correction, 1)
    assert learn(correction, 1)
    draft(correction, 1)
    correction.reset()
    assert learn(correction, 1) == []


def test_a_head_tells_which_tokens_it_has() -> None:
    from dyntree_plugin.engine.head_speculator import HeadSpeculator

    model = SimpleNamespace(draft_id_to_target_id=torch.tensor([0, 4, 7]))
    head: Any = SimpleNamespace(model=model)
    assert HeadSpeculator._proposed(head).tolist() == [0, 5, 9]
    model.draft_id_to_target_id = None
    assert HeadSpeculator._proposed(head) is None
