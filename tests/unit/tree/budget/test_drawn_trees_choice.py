"""Drawn trees: forwards and nodes are chosen together, from earlier trees alone."""

from __future__ import annotations

import numpy as np
import pytest

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
        count = found.cut(values, drawn, needed, found.forwards, seconds, None)
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
            count = found.cut(values, drawn, needed, found.forwards, seconds, None)
        chosen.append((found.forwards, int(count[0])))
    assert max(chosen[0]) < 5
    assert chosen[1] == (FORWARDS, NODES)


def test_a_tree_with_better_nodes_than_usual_keeps_more_of_them() -> None:
    """Control: a worse one keeps fewer. How far it was drafted was decided before."""
    seconds, drawn = 0.1 + 0.02 * np.arange(40), np.array([True])
    found = DrawnTreeChoice(FORWARDS)
    for _ in range(20):
        found.choose(1, seconds, 1e-3)
        values, needed = tree(found.forwards)
        usual = found.cut(values, drawn, needed, found.forwards, seconds, None)[0]
    given, forwards = (drawn, needed, found.forwards, seconds, None), found.forwards
    assert found.cut(values**0.5, *given)[0] > usual > found.cut(values**2, *given)[0]
    assert found.forwards == forwards


@pytest.mark.parametrize("requests", [1, 4])
def test_batches_of_other_sizes_are_learned_apart(requests: int) -> None:
    """Control: one of the same size is believed."""
    found, seconds = DrawnTreeChoice(FORWARDS), 0.1 + 0.02 * np.arange(40)
    for each, chances in ((4, VALUES[None].repeat(4, axis=0)), (requests, VALUES[None] ** 4)):
        for _ in range(60):
            found.choose(each, seconds, 1e-4)
            whole = chances.repeat(each // len(chances), axis=0)
            needed = np.zeros(whole.shape, dtype=int)
            found.cut(whole, np.ones(each, dtype=bool), needed, FORWARDS, seconds, None)
    expected = found.rate
    found.choose(4, seconds, 1e-4)
    assert found.rate is not None
    assert expected is not None
    assert (found.rate > 1.2 * expected) == (requests == 1)


def test_the_best_nodes_of_a_batch_are_worth_what_they_add_to_each_request() -> None:
    values = np.array([[0.9, 0.6, 0.5], [0.3, 0.2, 0.0]])
    needed = np.array([[0, 1, 2], [0, 0, 0]])
    found = batch_worth(values, needed, 2)
    assert found.shape == (3, 4)
    np.testing.assert_allclose(found[2], [0, 0.75, 1.15, 1.25])
    np.testing.assert_allclose(found[0], [0, 0.6, 0.7, 0.7])


def test_the_first_trees_take_no_more_rows_than_a_step_has() -> None:
    values, needed = (each.repeat(4, axis=0) for each in tree(FORWARDS))
    given = np.ones(4, dtype=bool), needed, FORWARDS
    count = DrawnTreeChoice(FORWARDS).cut(values, *given, np.arange(10.0), None)
    assert count.sum() == 10 - 1 - 4
