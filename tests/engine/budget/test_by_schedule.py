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
from dyntree_plugin.engine.telemetry.counts import WorkerCounts
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
