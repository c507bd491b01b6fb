"""Drawn trees: forwards and nodes are chosen together, from earlier trees alone."""

from __future__ import annotations

import numpy as np

from dyntree_plugin.tree.budget.drawn_trees import DrawnTreeChoice
from dyntree_plugin.tree.budget.worth import batch_worth

FORWARDS, NODES = 7, 16
VALUES = np.sort(0.8 ** np.arange(1, 9).repeat(2))[::-1] / np.array([1, 2] * 8)
"""Of a tree with two nodes on each level, the second worth half of the first."""


def tree(forwards: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and needed forwards of such a tree after so many forwards, in order."""
    needed = np.arange(8).repeat(2)
    values = np.where(needed <= forwards, VALUES, 0.0)
    order = np.argsort(-values, kind="stable")
    return values[order][None], needed[order][None]


def run(seconds: np.ndarray, forward: float, steps: int = 60) -> tuple[int, int]:
    """Return forwards and nodes after some steps of one request."""
    found, drawn = DrawnTreeChoice(FORWARDS), np.array([True])
    for _ in range(steps):
        found.choose(1, seconds, forward)
        values, needed = tree(found.forwards)
        count = found.cut(values, drawn, needed, found.forwards)
    return found.forwards, int(count[0])


def test_cheap_forwards_and_rows_are_used_and_dear_ones_are_not() -> None:
    flat, steep = np.full(40, 0.1), 0.1 + 0.05 * np.arange(40)
    assert run(flat, 1e-5) == (FORWARDS, NODES)
    assert run(flat, 0.03)[0] < 3
    assert run(steep, 1e-5)[1] < 4


def test_rows_that_become_cheap_bring_forwards_and_nodes_back() -> None:
    """Neither pays alone: few forwards leave no nodes of worth, and few nodes need no forwards."""
    found, drawn = DrawnTreeChoice(FORWARDS), np.array([True])
    dear, cheap = 0.1 + 0.1 * np.arange(40), np.full(40, 0.1)
    chosen = []
    for seconds in (dear, cheap):
        for _ in range(80):
            found.choose(1, seconds, 1e-4)
            values, needed = tree(found.forwards)
            count = found.cut(values, drawn, needed, found.forwards)
        chosen.append((found.forwards, int(count[0])))
    assert max(chosen[0]) < 5
    assert chosen[1] == (FORWARDS, NODES)


def test_what_a_step_draws_decides_about_later_steps_alone() -> None:
    """Control: the next step's choice follows."""
    found, drawn = DrawnTreeChoice(FORWARDS), np.array([True])
    for _ in range(20):
        found.choose(1, 0.1 + 0.01 * np.arange(40), 1e-3)
        values, needed = tree(found.forwards)
        found.cut(values, drawn, needed, found.forwards)
    limit = found.cut(values, drawn, needed, found.forwards)[0]
    rich = np.full_like(values, 0.99)
    for _ in range(30):
        assert found.cut(rich, drawn, needed, found.forwards)[0] <= limit + 1
    found.choose(1, 0.1 + 0.01 * np.arange(40), 1e-3)
    assert found.cut(rich, drawn, needed, found.forwards)[0] > limit + 1


def test_the_best_nodes_of_a_batch_are_worth_what_they_add_to_each_request() -> None:
    values = np.array([[0.9, 0.6, 0.5], [0.3, 0.2, 0.0]])
    needed = np.array([[0, 1, 2], [0, 0, 0]])
    found = batch_worth(values, needed, 2)
    assert found.shape == (3, 4)
    np.testing.assert_allclose(found[2], [0, 0.75, 1.15, 1.25])
    np.testing.assert_allclose(found[0], [0, 0.6, 0.7, 0.7])
