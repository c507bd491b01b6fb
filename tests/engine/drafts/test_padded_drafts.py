"""A draft whose vocabulary is padded to another size grows the trees of one that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_model import HIDDEN, VOCAB, Draft
from drafted_steps import Drafting, differing, without_vllm

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.drafts import draft_model
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.plan import TreePlan

LACKING = 9
"""Tokens of the target that a narrow draft lacks."""
SHAPE: dict[str, Any] = {"max_depth": 4, "width": 2, "children": 3}
PLAN = DynTreeOptions(**SHAPE, lookup="off").resolve(7)
OF_BOTH = DynTreeOptions(max_depth=6, max_forwards=4, width=2, children=3).resolve(7)
"""A plan with look-up beside the draft."""
DRAWN = DynTreeOptions(
    **SHAPE, lookup="off", growth="dyspec", rule="without_replacement", budget="fixed"
).resolve(7)
MERGED = DynTreeOptions(
    growth="expansion", expansion=(2, 1, 1, 1), sampling="best", budget="fixed", drafts=("other",)
).resolve(16)
"""A plan in which two drafts grow a tree each."""


class Padded(Draft):
    """A draft with more columns than the target, whose logits are the largest there."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = VOCAB + 5
        self.head = torch.cat([self.head, torch.full((HIDDEN, 5), 50.0)], dim=1)


class Narrow(Draft):
    """A draft that lacks the target's last tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = VOCAB - LACKING
        self.head = self.head[:, : self.vocab_size]

    def _run_model(self, ids: torch.Tensor, *given: Any) -> torch.Tensor:
        if int(ids.max()) >= self.vocab_size:
            raise IndexError("a token is beyond the embedding")
        return super()._run_model(ids, *given)


class Unlikely(Draft):
    """A draft of the target's size that does as `Narrow` does."""

    def _run_model(self, ids: torch.Tensor, *given: Any) -> torch.Tensor:
        return super()._run_model(ids.clamp(max=VOCAB - LACKING - 1), *given)

    def compute_draft_logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        found = super().compute_draft_logits(hidden, step)
        found[:, VOCAB - LACKING :] = -torch.inf
        return found


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


def made(plan: TreePlan, *models: Draft) -> Drafting:
    return Drafting(CPUOps(), CompiledGrowth, captured=False, plan=plan, models=models)


@pytest.mark.parametrize("plan", [PLAN, OF_BOTH, DRAWN])
@pytest.mark.parametrize("other", [(Padded, Draft), (Narrow, Unlikely)])
def test_the_trees_are_those_of_a_draft_of_the_targets_size(
    other: tuple[type[Draft], type[Draft]], plan: TreePlan
) -> None:
    of_another, of_this = (made(plan, model()) for model in other)
    assert differing([of_another, of_this]) == []
    assert of_this.trees.counts.max() > 1


@pytest.mark.parametrize("plan", [PLAN, MERGED])
def test_drafts_of_three_sizes_grow_the_trees_of_three_of_one_size(plan: TreePlan) -> None:
    pools = [Draft(), Padded(), Narrow()], [Draft(), Draft(), Unlikely()]
    if plan is MERGED:
        pools = pools[0][1:], pools[1][1:]
    assert differing([made(plan, *pool) for pool in pools]) == []


def test_without_the_crop_a_padded_draft_proposes_its_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_model, "of_width", lambda logits, _: logits)
    assert differing([made(PLAN, model()) for model in (Padded, Draft)]) != []


def test_without_the_clamp_a_narrow_draft_reads_beyond_its_embedding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_model, "readable", lambda ids, *_: ids)
    with pytest.raises(IndexError):
        differing([made(PLAN, Narrow()) for _ in range(2)])
