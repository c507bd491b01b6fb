"""Worlds with known costs and acceptance: what the sizes for single trees make of the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dyntree_plugin.engine.budget.by_tree import TreeBudget
from dyntree_plugin.tree.budget.row_cost import RowCost

NODES, WIDTH, FORWARDS = 16, 4, 8
CHILDREN = np.array([0.8, 0.12, 0.05, 0.02])
"""Chances of a node's children where the draft is as good as the target."""
MEASURED = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of rows that start-up measures."""

Curve = Callable[[float], float]


def flat(rows: float) -> float:
    return 0.1 + 0.0003 * rows


def steep(rows: float) -> float:
    return 0.05 + 0.004 * rows


def by_blocks(rows: float) -> float:
    return 0.06 + 0.02 * float(np.ceil(rows / 16))


def dear_from_9(rows: float) -> float:
    return by_blocks(rows) * (2 if rows > 8 else 1)


@dataclass
class Grown:
    """A request's tree after each number of forwards, best nodes first.

    ``frontiers`` [FORWARDS, WIDTH]: values that the next forward expands. ``values``, ``forwards``
    [FORWARDS + 1, NODES]: of the nodes.
    """

    frontiers: list[list[float]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    forwards: list[list[int]] = field(default_factory=list)

    def keep(self, found: list[tuple[float, int]]) -> None:
        best = [*sorted(found, reverse=True), *[(0.0, 0)] * NODES][:NODES]
        self.values.append([value for value, _ in best])
        self.forwards.append([needed for _, needed in best])


def grow(quality: float) -> Grown:
    """Grow a tree best first whose draft has so much of the target's ``quality``."""
    chances = [float(each) for each in np.minimum(CHILDREN * quality, 0.97)]
    found = [(chance, 0) for chance in chances]
    unread, tree = list(found), Grown()
    tree.keep(found)
    for _ in range(FORWARDS):
        unread.sort(reverse=True)
        here, unread = unread[:WIDTH], unread[WIDTH:]
        tree.frontiers.append([value for value, _ in here])
        below = [(value * chance, needed + 1) for value, needed in here for chance in chances]
        found, unread = found + below, unread + below
        tree.keep(found)
    return tree


class World:
    """An engine whose steps take what they take, in which trees are worth what they are."""

    def __init__(self, seconds: Curve, forward: float, requests: int, steps: int) -> None:
        self.seconds, self.forward, self.requests = seconds, forward, requests
        self.random = np.random.default_rng(0)
        qualities = np.clip(self.random.normal(0.75, 0.25, (steps, requests)), 0.05, 1.2)
        self.trees = [[grow(each) for each in step] for step in qualities]
        self.values = np.array([[tree.values for tree in step] for step in self.trees])

    def took(self, rows: int, forwards: int) -> float:
        return self.seconds(rows) + self.forward * (1 + forwards) + 0.002

    def best(self, steps: slice) -> float:
        """Return the tokens per second of the best fixed number of forwards and nodes."""
        worth = self.values[steps].mean(axis=0).sum(axis=0).cumsum(axis=1)
        return max(
            (self.requests + (worth[f, n - 1] if n else 0.0))
            / self.took(self.requests * (1 + n), f)
            for f in range(1 + FORWARDS)
            for n in range(1 + NODES)
        )

    def run(self, budget: TreeBudget, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
        """Return the expected tokens and the seconds of every step, [steps, 2]."""
        now, made = [0.0], []
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        counts, values = np.zeros(self.requests, int), np.zeros((self.requests, NODES))
        for trees in self.trees:
            rows = self.requests + int(counts.sum())
            tokens = self.requests + values[np.arange(NODES) < counts[:, None]].sum()
            forwards = 0
            while forwards < FORWARDS and budget.drafting_pays(
                torch.tensor([tree.frontiers[forwards] for tree in trees]).log()
            ):
                forwards += 1
            slower = np.exp(self.random.normal(0, 0.03, 2))
            target = self.seconds(rows) * slower[0]
            draft = self.forward * (1 + forwards) * slower[1]
            now[0] += target + draft + 0.002
            budget.observe(self._batch(rows), 1 + forwards, {"target": target, "draft": draft})
            made.append((tokens, self.took(rows, forwards)))
            values = np.array([tree.values[forwards] for tree in trees])
            needed = torch.tensor([tree.forwards[forwards] for tree in trees])
            whole = torch.full((self.requests,), NODES)
            counts = budget.cut(torch.tensor(values).float().log(), whole, needed).numpy()
        return np.array(made)

    def _batch(self, rows: int) -> Any:
        decoding = np.full(self.requests, 100)
        return SimpleNamespace(
            num_reqs=self.requests,
            num_tokens=rows,
            num_computed_tokens_np=decoding,
            num_scheduled_tokens=np.ones(self.requests, int),
            prefill_len_np=decoding,
            is_prefilling_np=decoding < 0,
        )


def of_best(world: World, believed: Curve, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the tokens per second over those of the best fixed setting, of 200 steps each."""
    budget = TreeBudget()
    budget.measured(RowCost(MEASURED, tuple(believed(rows) for rows in MEASURED), 200))
    made = world.run(budget, monkeypatch)
    parts = [slice(first, first + 200) for first in range(0, len(made), 200)]
    return [made[each, 0].sum() / made[each, 1].sum() / float(world.best(each)) for each in parts]


@pytest.mark.parametrize("believed", [flat, steep, by_blocks, dear_from_9])
@pytest.mark.parametrize("seconds", [flat, steep, by_blocks])
@pytest.mark.parametrize(("requests", "forward"), [(1, 0.004), (4, 0.0005), (4, 0.02)])
def test_after_200_steps_no_fixed_setting_is_faster(
    requests: int,
    forward: float,
    seconds: Curve,
    believed: Curve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever start-up believed, within 4 %."""
    world = World(seconds, forward, requests, 400)
    assert of_best(world, believed, monkeypatch)[1] > 0.96


def test_what_was_never_tried_stays_too_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without trying, and with costs that do not move."""
    world = World(flat, 0.0005, 4, 400)
    monkeypatch.setattr(TreeBudget, "_tries", False)
    monkeypatch.setattr(RowCost, "observe", lambda *_: 1.0)
    assert of_best(world, dear_from_9, monkeypatch)[1] < 0.95


def test_the_costs_of_another_machine_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine becomes steep after 300 steps: others use its cores."""
    now = [0]
    world = World(lambda rows: flat(rows) if now[0] < 300 else steep(rows), 0.004, 4, 800)
    made = []

    class Counting(TreeBudget):
        def observe(self, *given: Any) -> None:
            now[0] += 1
            super().observe(*given)

    budget = Counting()
    budget.measured(RowCost(MEASURED, tuple(map(flat, MEASURED)), 200))
    made = world.run(budget, monkeypatch)[500:]
    assert made[:, 0].sum() / made[:, 1].sum() > 0.97 * world.best(slice(500, None))


def test_nodes_of_shuffled_values_are_worth_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a budget that believes other requests' trees makes less of the same world."""
    right, wrong = (World(steep, 0.004, 4, 400) for _ in range(2))
    fair = of_best(right, steep, monkeypatch)[1]
    cut = TreeBudget.cut

    def of_others(self: TreeBudget, values: torch.Tensor, *given: Any) -> torch.Tensor:
        return cut(self, values.roll(1, 0), *given)

    monkeypatch.setattr(TreeBudget, "cut", of_others)
    assert of_best(wrong, steep, monkeypatch)[1] < fair - 0.02
