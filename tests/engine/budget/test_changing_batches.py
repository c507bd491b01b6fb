"""A simulation: batches that change, and drawn chains.

Whatever the budget learned of one number of requests, it has to choose well for the next within 200
steps. Seconds are those of `World`, so no machine's speed decides a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from test_regret import (
    RUNS,
    Curve,
    Grown,
    Shuffled,
    World,
    by_blocks,
    dear_from_9,
    flat,
    larger,
    sizes_for_trees,
    steep,
)

from dyntree_plugin.engine.budget.by_tree import TreeBudget
from dyntree_plugin.tree.budget import learned
from dyntree_plugin.tree.budget.row_cost import RowCost

DEPTH, FORWARD, STEPS = 8, 0.0015, 200
BATCHES = (4, 1, 4, 16, 64)
CURVES = (flat, steep, by_blocks, larger)


def chain(chances: list[float]) -> Grown:
    """Return a drawn chain; a forward draws a token of each request."""
    return Grown(
        [[chance] for chance in chances[:-1]],
        [[*chances[: 1 + f], *[0.0] * (DEPTH - 1 - f)] for f in range(DEPTH)],
        [[*range(DEPTH)]] * DEPTH,
    )


class Chains(World):
    """A world whose requests have drawn chains."""

    def __init__(
        self, seconds: Curve, batches: Sequence[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(seconds, FORWARD, (), STEPS, monkeypatch)
        made = np.random.default_rng(2)
        drawn = [self.chances(made, batch) for batch in batches for _ in range(STEPS)]
        self.trees = [[chain(of_one) for of_one in step.tolist()] for step in drawn]

    def chances(self, made: np.random.Generator, requests: int) -> np.ndarray:
        """Texts differ in how easy they are, and so do their places."""
        of_text, of_place = made.normal(size=(requests, 1)), made.normal(size=(requests, DEPTH))
        return np.cumprod(1 / (1 + np.exp(-1.2 - of_text - of_place)), axis=1)

    def of_best(self, first: int, end: int) -> float:
        """Return the tokens per second of these steps, over those of the best fixed chain."""
        drawn = np.array([[tree.values[-1] for tree in step] for step in self.trees[first:end]])
        requests = drawn.shape[1]
        worth = np.concatenate([[1.0], drawn.mean(axis=(0, 1))]).cumsum()
        best = max(
            requests * tokens / self.took(requests * (1 + length), max(length - 1, 0))
            for length, tokens in enumerate(worth)
        )
        tokens, seconds = np.sum(self.made[first:end], axis=0)
        return float(tokens / seconds / best)


run_chains = partial(sizes_for_trees, drawn=True)


def worst(world: Chains, seen: int = STEPS // 2) -> float:
    """Return the least `of_best` of a number of requests, without its first steps."""
    firsts = range(0, len(world.trees), STEPS)
    return min(world.of_best(first + seen, first + STEPS) for first in firsts)


@pytest.mark.parametrize("believed", [flat, steep, dear_from_9])
@pytest.mark.parametrize("seconds", CURVES)
def test_drawn_chains_lose_to_no_fixed_chain_when_the_batch_changes(
    seconds: Curve, believed: Curve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3 %, whatever start-up believed, and within 5 % with the first steps."""
    world = Chains(seconds, BATCHES, monkeypatch)
    run_chains(world, believed)
    assert worst(world) > 0.97
    assert worst(world, 0) > 0.95


def test_frozen_costs_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: what start-up believed stays."""
    monkeypatch.setattr(learned, "OPTIMISM", 0.0)
    monkeypatch.setattr(RowCost, "observe", lambda *_: 1.0)
    world = Chains(flat, BATCHES, monkeypatch)
    run_chains(world, dear_from_9)
    assert worst(world) < 0.95


@pytest.mark.parametrize("seconds", CURVES)
def test_trying_what_is_not_known_costs_less_than_one_percent(
    seconds: Curve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where start-up was right, so that there is nothing to find."""
    made = []
    for share in (learned.SHARE, 0.0):
        monkeypatch.setattr(learned, "SHARE", share)
        world = Chains(seconds, (4, 1), monkeypatch)
        run_chains(world, seconds)
        made.append(np.array([world.of_best(0, STEPS), world.of_best(STEPS, 2 * STEPS)]))
    assert (made[0] > 0.99 * made[1]).all()


def test_shuffled_chances_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: chains are cut by the chances of another text, whose average is the same."""
    made = []
    for budget in (TreeBudget(DEPTH - 1), Shuffled(DEPTH - 1)):
        world = Chains(steep, (16,), monkeypatch)
        run_chains(world, steep, budget)
        made.append(world.of_best(STEPS // 2, STEPS))
    assert made[1] < made[0] - 0.03


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("seconds", CURVES)
def test_trees_lose_to_no_fixed_size_when_the_batch_changes(
    seconds: Curve, run: Callable[[World, Curve], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3 %, 100 steps after a change."""
    world = World(seconds, FORWARD, (4, 1, 4), STEPS, monkeypatch)
    run(world, seconds)
    for end in range(STEPS, len(world.trees) + 1, STEPS):
        assert world.of_best(end - STEPS // 2, end) > 0.97
