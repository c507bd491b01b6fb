"""Drafting in graphs of single forwards grows the trees of eager drafting with as many forwards.

A graph is replaced by a call that runs again, as in `replays`.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from draft_model import MOST, VOCAB
from drafted_steps import (
    NO_BATCH,
    NO_STATES,
    Make,
    differing,
    packed,
    step,
)

from dyntree_kernels.contracts import BOTH, DRAFT, LOOK_UP, GrowthSettings
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.cuda.captured import CapturedDrafting, Replay
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.records import Emitted
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.drafting import grow
from dyntree_plugin.tree.plan import TreePlan

PLAN = DynTreeOptions(max_depth=4, width=2, children=3, budget="adaptive", lookup="off").resolve(7)
FORWARDS = len(PLAN.growing.widths)
OF_BOTH = DynTreeOptions(max_depth=6, max_forwards=4, width=2, children=3).resolve(7)
"""A plan with look-up beside the draft."""
OF_LOOK_UP = DynTreeOptions(max_depth=6).resolve(7, draft=False)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("plan", [PLAN, OF_BOTH, OF_LOOK_UP])
def test_any_number_of_forwards_grows_the_trees_of_eager_drafting(
    draftings: Make, plan: TreePlan
) -> None:
    made = draftings(plan=plan)
    assert differing(made) == []
    tree = made[0].trees
    chains = torch.arange(MOST) == 3
    assert tree.counts[:MOST][~chains].min() > 0
    assert tree.depths.max() >= (plan.shape.forwards or 4)
    real = torch.arange(plan.shape.node_budget) < tree.counts[:MOST, None]
    kinds = {DRAFT} if plan is PLAN else {DRAFT, LOOK_UP, BOTH} if plan is OF_BOTH else {LOOK_UP}
    assert {*tree.kinds[:MOST][real].tolist()} >= kinds


def test_a_look_up_in_texts_that_are_captured_with_is_seen(draftings: Make) -> None:
    """Control: tries of the texts as they were at capture are not those of the step."""
    made = draftings(plan=OF_LOOK_UP)
    made[1].texts.all_token_ids.gpu = made[1].texts.all_token_ids.gpu.flip(1).contiguous()
    assert differing(made) != []


def test_trees_of_other_numbers_of_forwards_differ(
    draftings: Make,
) -> None:
    """Control: another number of forwards gives other trees."""
    eager = draftings()[0]
    with torch.inference_mode():
        trees = [step(eager, 2, forwards) for forwards in range(1 + FORWARDS)]
    for fewer, more in pairwise(trees):
        assert not all(torch.equal(a, b) for a, b in zip(fewer, more, strict=True))


class Keeping(CompiledGrowth):
    """Keep the requests in memory of the call that starts growth."""

    def __init__(self, settings: GrowthSettings) -> None:
        super().__init__(settings)
        self._given = settings.of_requests
        self._kept: dict[int, Any] = {}

    def start(self, requests: int) -> None:
        *others, slots = self._given.first(requests)  # Wrong slots would end the process.
        self._kept[requests] = (*(each.clone().numpy() for each in others), slots.numpy())
        super().start(requests)

    def resume(self, requests: int, forwards: int) -> None:
        self._of_requests = self._kept[requests]
        super().resume(requests, forwards)


@pytest.mark.parametrize(("fewest", "replays"), [(0, [2, 2, 2, 3]), (FORWARDS, [2])])
def test_forwards_are_replayed_in_few_graphs(
    draftings: Make, fewest: int, replays: list[int]
) -> None:
    """Three forwards are a run of two and one of one, unless every step has three."""
    stages = draftings()[1].drafter.stages
    made, asked = CapturedDrafting(stages, [5], MOST, MOST, VOCAB, fewest), Counter[int]()
    every = [graphs for graphs in made.stages if graphs not in made.catch_up.graphs.values()]
    with torch.inference_mode():
        for graphs in every:
            graphs.capture(lambda run: (lambda: asked.update([forwards]), run()))
        for forwards in range(fewest, FORWARDS + 1):
            grow(Replay(made, packed([1, 2])), forwards)
    assert [*asked.values()] == replays


def test_what_does_not_outlive_its_graph_is_seen(draftings: Make) -> None:
    assert differing(draftings(Keeping)) != []


def test_a_graph_of_another_number_of_forwards_is_seen(
    draftings: Make,
) -> None:
    made = draftings()
    of_all = made[1].drafting.finish[FORWARDS]
    made[1].drafting.finish = dict.fromkeys(range(1 + FORWARDS), of_all)
    found = differing(made)
    assert {forwards for _, forwards in found} >= {*range(FORWARDS)}


def test_growth_that_is_not_compiled_is_one_graph_of_every_forward(
    draftings: Make,
) -> None:
    eager, of_graphs = draftings(None)
    fewest = (eager.graphs.fewest_forwards, of_graphs.graphs.fewest_forwards)
    assert fewest == (0, FORWARDS)
    with torch.inference_mode():
        for number in range(8):
            ours, theirs = (step(each, number, FORWARDS) for each in (eager, of_graphs))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_a_tree_the_draft_reads_on_all_the_same(
    draftings: Make,
) -> None:
    ran: list[list[int]] = []
    for drafting in draftings():
        stock = drafting.model._run_model
        rows: list[int] = []

        def watched(ids: torch.Tensor, *more: Any, _stock: Any = stock, _rows: Any = rows) -> Any:
            _rows.extend(ids.tolist())
            return _stock(ids, *more)

        drafting.model._run_model = watched
        emitted = Emitted(torch.tensor([9, 30]), torch.tensor([[4], [6]]), torch.ones(2).int(), 1)
        with torch.inference_mode():
            drafting.player(packed([1, 5])).catch_up(CatchUp(NO_BATCH, emitted, NO_STATES, 9))
        ran.append(rows)
    assert ran == [[4, 6], [4, 6]]
