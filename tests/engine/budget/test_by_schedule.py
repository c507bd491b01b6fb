"""The adaptive budget in the engine: what it learns from steps, and what it decides by that.

`test_regret` and `test_changing_batches` have more worlds, and other changes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_regret import FORWARDS, SIZES, OneSize, World, cost, flat, grow

from dyntree_plugin.engine.budget.by_schedule import NodeBuckets
from dyntree_plugin.engine.step.count import report
from dyntree_plugin.engine.step.ops import at_hand
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.telemetry.counts import MOST_SAMPLED, WorkerCounts
from dyntree_plugin.engine.telemetry.step_record import StepRecord
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.budget import learned


class Engine(OneSize):
    """An engine whose ``requests`` all have drafts of one ``quality``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        quality: float = 1.0,
        forward: float = 0.004,
        requests: int = 1,
        fewest: int = 0,
        of_position: float = 0.0,
    ) -> None:
        super().__init__(World(flat, forward, (), 0, monkeypatch), cost(flat, of_position), fewest)
        self.quality, self.requests = quality, requests

    def run(self, steps: int, **noted: Any) -> float:
        """Tokens per second of so many steps, as a part of the best fixed setting's; the worker
        counts what is ``noted`` with the first."""
        first = len(self.world.made)
        self.world.trees += [[grow(self.quality)] * self.requests] * steps
        for trees in self.world.trees[first:]:
            self.expected = self.step(trees, **noted)
            noted = {}
        return self.world.of_best(first, first + steps)


def test_the_choice_follows_drafts_that_become_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, forward=0.001)
    assert engine.budget[1] == SIZES[-1], "nothing is known yet"
    engine.run(400)
    assert engine.run(200) > 0.96
    assert engine.expected is not None
    assert engine.expected.expected == pytest.approx(engine.expected.measured, rel=0.1)
    engine.world.forward = 0.03
    engine.run(1300)
    assert engine.run(640) > 0.95


def test_trees_shrink_with_the_first_step_of_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = []
    for of_position in (
        1e-7,
        0.0,
    ):  # The second is the control: rows were measured without context.
        engine = Engine(monkeypatch, of_position=of_position)
        engine.run(600)
        engine.run(1, context=1e6)
        nodes.append(engine.nodes)
    assert nodes[0] < nodes[1]


def test_without_trying_more_a_change_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of trees that do not pay nothing is learned unless some are grown."""
    shares = []
    for share in (learned.SHARE, 0.0):
        monkeypatch.setattr(learned, "SHARE", share)
        engine = Engine(monkeypatch, quality=0.05, requests=64)
        engine.run(600)
        assert (engine.forwards, engine.nodes) == (0, 0)
        engine.quality = 1.2
        engine.run(1300)
        shares.append(engine.run(640))
    assert shares[0] > 0.95
    assert shares[1] < 0.8


def test_new_weights_are_judged_within_64_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "SHARE", 0.0)
    shares = []
    for replaced in ({"draft": 1}, {}):  # The second is the control: nobody told.
        engine = Engine(monkeypatch, quality=0.05, requests=64)
        engine.run(600)
        engine.quality = 1.2
        engine.run(64, replaced=replaced)
        shares.append(engine.run(32))
    assert shares[0] > 0.9
    assert shares[1] < 0.8


def test_where_drafting_cannot_end_early_every_forward_is_reckoned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: where it can, it does."""
    found = []
    for fewest in (FORWARDS, 0):
        engine = Engine(monkeypatch, forward=0.03, fewest=fewest)
        found.append({engine.forwards for _ in range(300) if engine.run(1)})
    assert found[0] == {FORWARDS} != found[1]


@pytest.mark.parametrize(
    ("synchronous", "further", "forwards", "seconds"),
    [(True, 2, 6, 0.4), (False, 2, 6, 0.7), (True, 0, 0, 0.9), (True, None, 0, 1.0)],
    ids=["its own", "of the trees that it verified", "look-up alone", "none"],
)
def test_the_drafting_between_two_outputs_is_no_cost_of_rows(
    synchronous: bool,
    further: int | None,
    forwards: int,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is a pause for other weights."""
    now, seen = [0.0], list[tuple[int, float]]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def observe(rows: int, took: float, context: float) -> float:
        seen.append((rows, took))
        return took

    cost: Any = SimpleNamespace(observe=observe)
    buckets = NodeBuckets(SIZES, FORWARDS, synchronous=synchronous)
    buckets.measured(cost)
    counts = WorkerCounts([True], draft_forwards=forwards, growth_forwards=further)
    counts.drafted = [(1, 6, 0.6)]
    for _ in range(2):
        now[0] += 1.0
        found = buckets.observe(counts, 9)
    assert seen == [(9, pytest.approx(seconds))]
    assert found is not None
    counts.replaced = {"draft": 1}
    now[0] += 100.0
    assert buckets.observe(counts, 9) is None
    assert len(seen) == 1


def test_steps_that_read_a_prompt_teach_a_scheduler_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: if all requests decode, it learns from such steps."""
    found, worth = [], [[9.0] * len(SIZES)] * (1 + FORWARDS)
    for decoding in ([], [True, False], [True, True]):
        engine = Engine(monkeypatch, requests=2)
        engine.run(300)
        for _ in range(50 * bool(decoding)):
            engine.world.now += 100.0
            counts = WorkerCounts(decoding, verified=True, worth=worth, growth_forwards=FORWARDS)
            engine.budget.observe(counts, 500)
        found.append((engine.budget[2], engine.budget.forwards))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("ended_early", "verified"), [(True, True), (False, True), (True, False)])
def test_trees_that_no_forward_could_change_are_whole(
    ended_early: bool, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting ends where look-up and few forwards fill the trees. Control: without knowing that,
    or if no tree was verified, the budget waits for trees of every forward, and chooses nothing."""
    engine = Engine(monkeypatch)
    worth = [[min(0.9 * size, 1.8) for size in SIZES]] * (1 + FORWARDS)
    for _ in range(100):
        engine.world.now += 2.0
        counts = WorkerCounts(
            [True], verified=verified, worth=worth, growth_forwards=2, ended_early=ended_early,
            drafted=[(1, 3, 0.3)],
        )  # fmt: skip
        engine.budget.observe(counts, 9)
    engine.budget[1]
    assert engine.budget.forwards == (0 if ended_early and verified else FORWARDS)


def noted_worth(
    trees: TreeStore, decoding: list[bool], context: int, sizes: tuple[int, ...]
) -> list[list[float]]:
    """Return what a step of these requests sends about the worth of their trees."""
    requests = len(decoding)
    record = StepRecord(sizes=sizes)
    batch: Any = SimpleNamespace(
        num_reqs=requests,
        num_tokens=4 * requests,
        is_prefilling_np=~np.array(decoding),
        num_computed_tokens_np=np.full(requests, context),
        num_draft_tokens_per_req=None,
    )
    slots = torch.arange(1, 1 + requests)
    record.sampled(batch, report(trees, slots), trees.plan, False, 1)
    record.send(at_hand)
    return record.counts().worth


def stored(values: torch.Tensor, depths: torch.Tensor, budget: str = "adaptive") -> TreeStore:
    """Store trees of these values and depths, each of which needed a forward for each level."""
    requests, nodes = values.shape
    plan = DynTreeOptions(budget=budget, max_depth=2).resolve(nodes)
    trees = TreeStore(requests, plan, 8, torch.device("cpu"))
    trees.values[1:], trees.depths[1:], trees.forwards[1:] = values.log(), depths, depths - 1
    return trees


def test_steps_note_what_trees_were_worth_where_the_scheduler_needs_it() -> None:
    values = torch.tensor([[0.8, 0.4, 0.2], [0.6, 0.2, 0.0], [1.0, 1.0, 1.0]])
    depths = torch.tensor([[1, 2, 2], [1, 1, 1], [1, 1, 1]])
    sizes, decoding = (0, 1, 2, 3), [True, True, False]
    # Of no node, one, two and three; without a forward, and with one.
    assert noted_worth(stored(values, depths), decoding, 5, sizes) == [
        pytest.approx([0, 0.7, 0.8, 0.8]),
        pytest.approx([0, 0.7, 1.0, 1.1]),
    ]
    assert noted_worth(stored(values, depths), decoding, 5, ()) == []
    assert noted_worth(stored(values, depths, "fixed"), decoding, 5, sizes) == []


@pytest.mark.parametrize("requests", [1, 8, 9, 15, 23])
def test_steps_sample_as_many_trees_as_the_budget_counts(requests: int) -> None:
    """And in other steps those of other requests."""
    sampled = np.zeros((requests, requests), dtype=bool)  # by context and request
    for place in range(requests):
        values = 0.5 * torch.eye(requests)[place, :, None].expand(-1, 2)
        trees = stored(values, torch.ones(requests, 2))
        for context in range(requests):
            worth = noted_worth(trees, [True] * requests, context, (0, 1))
            sampled[context, place] = worth[0][1] > 0
    assert (sampled.sum(axis=1) == min(requests, MOST_SAMPLED)).all()
    assert sampled.any(axis=0).all()
