"""The adaptive budget in the engine: what it learns from steps, and what it decides by that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dyntree_plugin.engine.budget.by_schedule import NodeBuckets
from dyntree_plugin.engine.step.count import report
from dyntree_plugin.engine.step.ops import at_hand
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.telemetry.counts import WorkerCounts
from dyntree_plugin.engine.telemetry.step_record import StepRecord
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.budget import learned
from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds

FORWARDS, SIZES = 7, (0, 1, 2, 4, 8)


class World:
    """An engine whose steps take what they take, in which trees are worth what they are.

    ``chance``: that one more node of a path is accepted. A tree's nodes are a chain down to the
    depth that forwards reach, and behind it siblings of a fifth of a node's chance.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.now, self.chance, self.requests = 0.0, 0.8, 1
        self.forward, self.row, self.fewest = 0.1, 0.001, 0
        self.context, self.of_position, self.measured_position = 0.0, 0.0, 0.0
        vars(self).update(more)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.buckets = NodeBuckets(SIZES, FORWARDS)
        # What is measured is a fifth off: contexts are longer.
        seconds = (0.8 * (1 + self.row), 0.8 * (1 + 3000 * self.row))
        cost = RowCost((1, 3000), seconds, 3000, self.measured_position)
        self.buckets.measured(cost, self.fewest)

        self.expected: StepSeconds | None = None
        self.waiting: tuple[int, int] | None = None  # forwards and nodes of the last trees
        self.tokens = 0.0
        self.replaced: dict[str, int] = {}
        self.chosen: list[tuple[int, int]] = []

    def worth(self, chance: float) -> np.ndarray:
        depth = np.arange(1, 2 + FORWARDS)
        side = 0.2 * chance ** np.arange(SIZES[-1])
        table = [
            np.sort(np.concatenate([chance ** depth[: 1 + f], side]))[::-1].cumsum()
            for f in range(1 + FORWARDS)
        ]
        return np.array([[0.0 if n == 0 else row[n - 1] for n in SIZES] for row in table])

    def seconds(self, forwards: int, nodes: int) -> float:
        row = self.row + self.of_position * self.context
        verifying = 1 + row * self.requests * (1 + nodes)
        return verifying + self.forward * (1 + forwards)

    def rate(self, forwards: int, nodes: int) -> float:
        made = 1 + self.worth(self.chance)[forwards, SIZES.index(nodes)]
        return self.requests * float(made) / self.seconds(forwards, nodes)

    @property
    def best(self) -> float:
        """Tokens per second of the best choice."""
        return max(self.rate(f, n) for f in range(1 + FORWARDS) for n in SIZES)

    def step(self) -> None:
        """Verify the trees that wait, and draft the next."""
        forwards, nodes = self.waiting or (0, 0)
        # The trees that wait were drafted behind the output of the last step.
        took = self.seconds(forwards, nodes)
        self.now += took
        table = self.worth(self.chance)
        table[forwards:] = table[forwards]
        self.tokens += self.requests * (1 + table[forwards, SIZES.index(nodes)])
        replaced, self.replaced = self.replaced, {}
        counts = WorkerCounts(
            [True] * self.requests,
            verified=bool(nodes),
            worth=table.tolist(),
            growth_forwards=forwards if nodes else None,
            drafted=[(self.requests, 1 + forwards, self.forward * (1 + forwards))],
            replaced=replaced,
            context=self.context,
        )
        self.expected = self.buckets.observe(counts, self.requests * (1 + nodes))
        nodes = self.buckets[self.requests]
        self.waiting = (self.buckets.forwards, nodes)
        self.chosen.append(self.waiting)

    def run(self, steps: int) -> float:
        """Tokens per second of so many steps, as a part of the best."""
        began, self.tokens = self.now, 0.0
        for _ in range(steps):
            self.step()
        return self.tokens / (self.now - began) / self.best


def test_the_choice_follows_drafts_that_become_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_regret` and `test_changing_batches` have more worlds, and other changes."""
    world = World(monkeypatch, forward=0.01)
    assert world.buckets[1] == SIZES[-1], "nothing is known yet"
    world.run(400)
    assert world.run(200) > 0.96
    assert world.expected is not None
    assert world.expected.expected == pytest.approx(world.expected.measured, rel=0.1)
    world.forward = 0.3
    world.run(1300)
    assert world.run(640) > 0.95


def test_trees_shrink_with_the_first_step_of_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = []
    for measured in (1e-6, 0.0):  # The second is the control: rows were measured without context.
        world = World(monkeypatch, of_position=1e-6, measured_position=measured)
        world.run(600)
        world.context = 1e6
        world.step()
        nodes.append(world.chosen[-1][1])
    assert nodes[0] < nodes[1]


def test_without_trying_more_a_change_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of trees that do not pay nothing is learned unless some are grown."""
    shares = []
    for share in (learned.SHARE, 0.0):
        monkeypatch.setattr(learned, "SHARE", share)
        world = World(monkeypatch, requests=64, row=0.01, chance=0.05)
        world.run(600)
        assert world.chosen[-2] == (0, 0)
        vars(world).update(chance=0.99)
        world.run(1300)
        shares.append(world.run(640))
    assert shares[0] > 0.95
    assert shares[1] < 0.8


def test_new_weights_are_judged_within_64_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "SHARE", 0.0)
    shares = []
    for replaced in ({"draft": 1}, {}):  # The second is the control: nobody told.
        world = World(monkeypatch, requests=64, row=0.01, chance=0.05)
        world.run(600)
        vars(world).update(chance=0.99, replaced=replaced)
        world.run(64)
        shares.append(world.run(32))
    assert shares[0] > 0.9
    assert shares[1] < 0.8


def test_where_drafting_cannot_end_early_every_forward_is_reckoned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, forward=0.3, fewest=FORWARDS)
    world.run(300)
    assert {forwards for forwards, _ in world.chosen} == {FORWARDS}


@pytest.mark.parametrize(("synchronous", "seconds"), [(True, 0.4), (False, 0.7)])
def test_the_drafting_between_two_outputs_is_no_cost_of_rows(
    synchronous: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the step's own, or that of the trees that the step verified."""
    now, seen = [0.0], list[tuple[int, float]]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def observe(rows: int, took: float, context: float) -> float:
        seen.append((rows, took))
        return took

    cost: Any = SimpleNamespace(observe=observe)
    buckets = NodeBuckets(SIZES, FORWARDS, synchronous=synchronous)
    buckets.measured(cost)
    for _ in range(2):
        now[0] += 1.0
        drafted = [(1, 6, 0.6)]
        counts = WorkerCounts([True], draft_forwards=6, growth_forwards=2, drafted=drafted)
        buckets.observe(counts, 9)
    assert seen == [(9, pytest.approx(seconds))]


def test_steps_that_read_a_prompt_teach_a_scheduler_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.run(300)
    before = world.buckets[1], world.buckets.forwards
    for _ in range(50):
        world.now += 100.0
        counts = WorkerCounts(
            [True, False], verified=True, worth=[[9.0] * 5] * 8, growth_forwards=7
        )
        world.buckets.observe(counts, 500)
    assert (world.buckets[1], world.buckets.forwards) == before


@pytest.mark.parametrize(("ended_early", "verified"), [(True, True), (False, True), (True, False)])
def test_trees_that_no_forward_could_change_are_whole(
    ended_early: bool, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting ends where look-up and few forwards fill the trees. Control: without knowing that,
    or if no tree was verified, the budget waits for trees of every forward, and chooses nothing."""
    world = World(monkeypatch)
    worth = [[0.0, 0.9, 1.5, 1.7, 1.8]] * (1 + FORWARDS)
    for _ in range(100):
        world.now += 2.0
        counts = WorkerCounts(
            [True], verified=verified, worth=worth, growth_forwards=2, ended_early=ended_early,
            drafted=[(1, 3, 0.3)],
        )  # fmt: skip
        world.buckets.observe(counts, 9)
    world.buckets[1]
    assert world.buckets.forwards == (0 if ended_early and verified else FORWARDS)


def test_steps_note_what_trees_were_worth_where_the_scheduler_needs_it() -> None:
    values = torch.tensor([[0.8, 0.4, 0.2], [0.6, 0.2, 0.0], [1.0, 1.0, 1.0]]).log()
    depths = torch.tensor([[1, 2, 2], [1, 1, 1], [1, 1, 1]])
    noted = []
    sizes = 0, 1, 2, 3
    for weighed, budget in ((sizes, "adaptive"), ((), "adaptive"), (sizes, "fixed")):
        plan = DynTreeOptions(budget=budget, max_depth=2).resolve(3)
        trees = TreeStore(4, plan, 8, torch.device("cpu"))
        trees.values[1:4], trees.depths[1:4] = values, depths
        trees.forwards[1:4] = depths - 1
        record = StepRecord(sizes=weighed)
        batch: Any = SimpleNamespace(
            num_reqs=3,
            num_tokens=12,
            is_prefilling_np=np.array([False, False, True]),
            num_computed_tokens_np=np.array([5, 5, 5]),
            num_draft_tokens_per_req=None,
        )
        record.sampled(batch, report(trees, torch.tensor([1, 2, 3])), plan, False, 1)
        record.send(at_hand)
        noted.append(record.counts().worth)
    # Of no node, one, two and three; without a forward, and with one.
    assert noted[0] == [pytest.approx([0, 0.7, 0.8, 0.8]), pytest.approx([0, 0.7, 1.0, 1.1])]
    assert noted[1:] == [[], []]
