"""Forwards and nodes are chosen together, from earlier trees, and trying costs little."""

from __future__ import annotations

import numpy as np
import pytest

from dyntree_plugin.tree.budget.drawn import valued_counts
from dyntree_plugin.tree.budget.learned import SHARE, Chosen, LearnedChoice
from dyntree_plugin.tree.budget.row_cost import RowCost
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


def choose(found: LearnedChoice, seconds: np.ndarray, forward: float, requests: int = 1) -> Chosen:
    return found.choose(requests, lambda _: seconds, forward * np.arange(1, FORWARDS + 2))


def taught(found: LearnedChoice, seconds: np.ndarray, forward: float) -> Chosen:
    """Return the choice after some steps of one request."""
    for _ in range(60):
        values, needed = tree(choose(found, seconds, forward).forwards)
        found.observe(batch_worth(values, needed, int(needed[values > 0].max())), 1)
    return next(each for _ in range(9) if not (each := choose(found, seconds, forward)).tries)


def test_a_tree_with_better_nodes_than_usual_keeps_more_of_them() -> None:
    """Control: a worse one keeps fewer. How far it was drafted was decided before."""
    seconds = 0.1 + 0.02 * np.arange(40)
    chosen = taught(LearnedChoice(FORWARDS), seconds, 1e-3)
    values, _ = tree(chosen.forwards)
    least = chosen.least_values(1, NODES, seconds)
    worse, usual, better = (valued_counts(values**power, least)[0] for power in (2, 1, 0.5))
    assert better > usual > worse


def test_a_node_never_has_to_be_worth_less_than_nothing() -> None:
    """Where more rows are hoped to take less time, as where they are tried."""
    found, falling = LearnedChoice(FORWARDS), np.linspace(0.2, 0.1, 40)
    chosen = taught(found, falling, 1e-3)
    assert chosen.row_tokens == 0.0


@pytest.mark.parametrize("requests", [1, 4])
def test_batches_of_other_sizes_are_learned_apart(requests: int) -> None:
    """Control: one of the same size is believed."""
    found, seconds = LearnedChoice(FORWARDS), 0.1 + 0.02 * np.arange(40)
    for each, chances in ((4, VALUES), (requests, VALUES**4)):
        whole = np.broadcast_to(chances, (each, NODES))
        for _ in range(60):
            found.observe(batch_worth(whole, np.zeros(whole.shape, dtype=int), FORWARDS), each)
        if chances is VALUES:
            expected = choose(found, seconds, 1e-4, 4).rate
    rate = choose(found, seconds, 1e-4, 4).rate
    assert rate is not None
    assert expected is not None
    assert (expected > 1.2 * rate) == (requests == 4)


def test_the_best_nodes_of_a_batch_are_worth_what_they_add_to_each_request() -> None:
    values = np.array([[0.9, 0.6, 0.5], [0.3, 0.2, 0.0]])
    needed = np.array([[0, 1, 2], [0, 0, 0]])
    found = batch_worth(values, needed, 2)
    assert found.shape == (3, 4)
    np.testing.assert_allclose(found[2], [0, 0.75, 1.15, 1.25])
    np.testing.assert_allclose(found[0], [0, 0.6, 0.7, 0.7])


def test_the_first_trees_take_no_more_rows_than_a_step_has() -> None:
    assert len(Chosen(FORWARDS, 0).least_values(4, NODES, np.arange(10.0))) == 10 - 1 - 4


@pytest.mark.parametrize("forward", [1e-4, 0.02])
def test_trying_is_expected_to_cost_no_more_than_its_share(forward: float) -> None:
    """Rows and forwards are tried nevertheless. Control: with a larger share, it costs more."""
    cost, lost, tried = RowCost((1, 40), (0.1, 0.9), 40), [], []
    for share in (SHARE, 50 * SHARE):
        found = LearnedChoice(FORWARDS)
        values, needed = tree(FORWARDS)
        found.observe(batch_worth(values, needed, FORWARDS), 4)
        seconds = 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dyntree_plugin.tree.budget.learned.SHARE", share)
            patch.setattr("dyntree_plugin.tree.budget.learned.AT_FIRST", 0.0)
            for _ in range(400):
                drafting = forward * np.arange(1, FORWARDS + 2)
                chosen = found.choose(4, lambda each: cost.seconds(optimism=each), drafting)
                seconds += float(cost.seconds()[4 * (1 + chosen.nodes)])
                seconds += forward * (1 + chosen.forwards)
                tried.append((chosen.optimism > 0, chosen.tries))
        lost.append(found.take_lost() / seconds)
        assert found.take_lost() == 0.0
    assert 0 < lost[0] <= SHARE < lost[1]
    assert np.any(tried[:400], axis=0).all()
