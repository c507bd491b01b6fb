"""Drafting in graphs grows the trees of eager drafting, whatever drafts them.

A graph is replaced by a call that runs again, as in `replays`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import drafted_steps
import pytest
import torch
from draft_model import MOST, VOCAB, Block, Draft, Head, Masked, MaskedHead, Placeless
from drafted_steps import NO_BATCH, NO_STATES, Drafting, Make, differing, packed, step

from dyntree_kernels.contracts import BOTH, DRAFT, LOOK_UP, GrowthSettings
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.cuda.captured import CapturedDrafting, Replay
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.growth_stages import DraftStages
from dyntree_plugin.engine.step.records import Emitted
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.drafting import grow
from dyntree_plugin.tree.plan import TreePlan

SMALL: dict[str, Any] = {"width": 2, "children": 3, "node_budget": 7}
ALONE = DynTreeOptions(**SMALL, max_depth=4, budget="adaptive", lookup="off")
BESIDE_LOOK_UP = DynTreeOptions(**SMALL, max_depth=6, max_forwards=4)
PLAN = ALONE.resolve(7)
FORWARDS = len(PLAN.growing.widths)
IN_TORCH = DynTreeOptions(max_depth=4, growth="chain", budget="fixed").resolve(4)
"""A plan whose growth is not compiled."""
OF_LOOK_UP = DynTreeOptions(max_depth=6).resolve(7, draft=False)
OF_BLOCK = {
    "alone": ALONE.resolve(5, block=True),
    "beside look-up": DynTreeOptions(**SMALL, max_depth=4).resolve(5, block=True),
    "of one level": DynTreeOptions(max_depth=1, node_budget=3, lookup="off").resolve(5, block=True),
}
PLANS: dict[str, tuple[type[Draft], TreePlan]] = {
    "look-up": (Draft, OF_LOOK_UP),
    "draft": (Draft, PLAN),
    "draft beside look-up": (Draft, BESIDE_LOOK_UP.resolve(7)),
    "head": (Head, ALONE.resolve(7, head=True)),
    "head beside look-up": (Head, BESIDE_LOOK_UP.resolve(7, head=True)),
    **{
        f"{model.__name__} {name}": (model, plan)
        for model in (Block, Masked, MaskedHead)
        for name, plan in OF_BLOCK.items()
    },
}
"""Drafts and their plans. Block drafts of all kinds have one graph."""

pytestmark = pytest.mark.usefixtures("one_thread")


def spoil_states_before_every_step(drafting: Drafting) -> None:
    """Leave NaN where a head reads states that the step has not written, and where padding
    reads."""
    stock = drafting.player

    def player(requests: torch.Tensor) -> Any:
        for each in (drafting.states.given, drafting.states.own, drafting.states.root):
            each.fill_(torch.nan)
        return stock(requests)

    drafting.player = player  # type: ignore[method-assign]


@pytest.mark.parametrize(("model", "plan"), PLANS.values(), ids=PLANS)
def test_any_number_of_forwards_grows_the_trees_of_eager_drafting(
    draftings: Make, model: type[Draft], plan: TreePlan
) -> None:
    made = draftings(plan=plan, model=model)
    if model is Head:
        spoil_states_before_every_step(made[1])
    assert differing(made) == []
    tree, shape = made[0].trees, plan.shape
    chains = torch.arange(MOST) == 3
    assert tree.counts[:MOST][~chains].min() > 0
    assert tree.depths.max() >= (shape.forwards or min(4, shape.max_depth))
    real = torch.arange(shape.node_budget) < tree.counts[:MOST, None]
    kinds = {DRAFT} if plan.has_draft else {LOOK_UP}
    if plan.has_draft and shape.grafts:
        kinds |= {BOTH} if shape.block else {BOTH, LOOK_UP}
    assert {*tree.kinds[:MOST][real].tolist()} >= kinds
    if shape.block:
        assert made[1].drafting.whole is not None
        assert not made[1].drafting.runs


OF_HEAD = PLANS["head"][1]


def of_chains_alone(draftings: Make, monkeypatch: pytest.MonkeyPatch) -> list[Drafting]:
    """Return an eager and a captured drafting, whose steps have a chain and no tree."""
    monkeypatch.setattr(drafted_steps, "BATCHES", [[3]])
    return draftings(plan=OF_HEAD, model=Placeless)


def widths(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the rows of each request in the forwards of a step."""
    stock, found = drafting.writer.rows, set()

    def rows(requests: int, width: int) -> Any:
        found.add(width)
        return stock(requests, width)

    monkeypatch.setattr(drafting.writer, "rows", rows)
    with torch.inference_mode():
        step(drafting, 0, FORWARDS)
    return found


def test_a_chain_alone_in_one_row_is_that_of_wider_forwards(
    draftings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = of_chains_alone(draftings, monkeypatch)
    assert differing(made) == []
    assert [widths(each, monkeypatch) for each in made] == [{1}, {SMALL["width"]}]
    assert made[0].trees.depths[3].max() == OF_HEAD.shape.max_depth
    monkeypatch.setattr(drafted_steps, "BATCHES", [[3, 4]])
    assert widths(made[0], monkeypatch) == {SMALL["width"]}


def test_a_chain_whose_states_are_kept_elsewhere_is_another(
    draftings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control."""
    made, stock = of_chains_alone(draftings, monkeypatch), DraftStages._shape

    def shape(stages: DraftStages, *given: Any) -> tuple[int, int]:
        requests, first = stock(stages, *given)
        return requests, first - stages._narrow

    monkeypatch.setattr(DraftStages, "_shape", shape)
    assert differing(made)


Change = Callable[[pytest.MonkeyPatch, Any], None]


def not_received(patch: pytest.MonkeyPatch, source: Any) -> None:
    patch.setattr(source, "receive", lambda emitted, target: None)


def reading(change: Callable[[Any, Any], object]) -> Change:
    """Let ``change``, which gets the rows of a forward and the source, change the rows."""

    def patched(patch: pytest.MonkeyPatch, source: Any) -> None:
        stock = source.forward

        def forward(rows: Any, *given: int) -> torch.Tensor:
            change(rows, source)
            found: torch.Tensor = stock(rows, *given)
            return found

        patch.setattr(source, "forward", forward)

    return patched


def expansions(head: Any) -> int:
    """Return how many states a head has of each request."""
    return int(head._states.own.shape[1])


deeper = reading(lambda rows, _: rows.positions.add_(1))
of_the_root = reading(
    lambda rows, head: rows.above.copy_(rows.above // expansions(head) * expansions(head))
)
of_another_request = reading(lambda rows, head: rows.above.remainder_(expansions(head)))


def without_the_last_state(patch: pytest.MonkeyPatch, source: Any) -> None:
    """Keep nothing of what the last emitted token follows."""
    block = source.reader._block
    stock = block.keep

    def keep(states: torch.Tensor, positions: torch.Tensor, slots: Any) -> None:
        last = torch.isin(positions, source._memory.root_positions - 1)
        stock(states, positions, slots.masked_fill(last, -1))

    patch.setattr(block, "keep", keep)


def other_masks(patch: pytest.MonkeyPatch, source: Any) -> None:
    """Read an ordinary token in place of masks."""
    text = source.reader
    patch.setattr(text, "_masks", text._masks._replace(token=0))


CHANGES: dict[str, tuple[str, Change]] = {
    "head: states that are not received": ("head", not_received),
    "head: the root's states": ("head", of_the_root),
    "head: another request's states": ("head", of_another_request),
    "block: states that are not received": ("Block alone", not_received),
    "block: the next position": ("Block alone", deeper),
    "block: no last state": ("Block alone", without_the_last_state),
    "masks: the next position": ("Masked alone", deeper),
    "masks: other tokens": ("Masked alone", other_masks),
    "masks of a head: states that are not received": ("MaskedHead alone", not_received),
}


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES)
def test_what_a_draft_reads_in_graphs_is_seen(
    name: str, change: Change, draftings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = PLANS[name]
    made = draftings(plan=plan, model=model)
    change(monkeypatch, made[1].source)
    assert differing(made) != []


def test_a_look_up_in_texts_that_are_captured_with_is_seen(draftings: Make) -> None:
    """Control: tries of the texts as they were at capture are not those of the step."""
    made = draftings(plan=OF_LOOK_UP)
    made[1].texts.all_token_ids.gpu = made[1].texts.all_token_ids.gpu.flip(1).contiguous()
    assert differing(made) != []


def test_trees_of_other_numbers_of_forwards_differ(draftings: Make) -> None:
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


def test_a_graph_of_another_number_of_forwards_is_seen(draftings: Make) -> None:
    made = draftings()
    of_all = made[1].drafting.finish[FORWARDS]
    made[1].drafting.finish = dict.fromkeys(range(1 + FORWARDS), of_all)
    found = differing(made)
    assert {forwards for _, forwards in found} >= {*range(FORWARDS)}


def test_growth_that_is_not_compiled_is_one_graph_of_every_forward(draftings: Make) -> None:
    eager, of_graphs = draftings(plan=IN_TORCH)
    fewest = (eager.graphs.fewest_forwards, of_graphs.graphs.fewest_forwards)
    assert fewest == (0, FORWARDS)
    with torch.inference_mode():
        for number in range(8):
            ours, theirs = (step(each, number, FORWARDS) for each in (eager, of_graphs))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_a_tree_the_draft_reads_on_all_the_same(draftings: Make) -> None:
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
