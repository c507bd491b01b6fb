"""The adaptive node budget: its choice is the best there is, and what it rests on stays sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_plugin.tree.budget.choice import drafting_rates
from dyntree_plugin.tree.budget.plain_steps import LevelAndTilt
from dyntree_plugin.tree.budget.row_cost import MEMORY, RowCost, followed
from dyntree_plugin.tree.budget.worth import DraftingSeconds, worth_by_forwards

CURVES = st.lists(st.floats(0, 0.5), min_size=20, max_size=20).map(
    lambda steps: 1.0 + np.cumsum(steps)
)
"""Seconds of a step by its rows."""

WORTHS = st.lists(st.lists(st.floats(0, 8), min_size=4, max_size=4), min_size=1, max_size=5).map(
    lambda rows: np.array(rows).cumsum(axis=0).cumsum(axis=1)
)


@settings(deadline=None)
@given(WORTHS, CURVES, st.floats(0, 2), st.integers(1, 4))
def test_forwards_and_nodes_make_their_tokens_in_the_seconds_of_their_rows(
    worth: np.ndarray, seconds: np.ndarray, forward: float, requests: int
) -> None:
    sizes = (0, 1, 2, 4)
    drafting = forward * np.arange(1, 1 + len(worth))
    rates, taken = drafting_rates(worth, requests, seconds, drafting, sizes)
    for forwards in range(len(worth)):
        for at, nodes in enumerate(sizes):
            rows = requests * (1 + nodes)
            held = min(rows, len(seconds) - 1)
            took = seconds[held] * rows / held + forward * (1 + forwards)
            assert taken[forwards, at] == pytest.approx(took)
            made = requests * (1 + worth[forwards, at])
            assert rates[forwards, at] == pytest.approx(made / took)


def test_drafting_takes_a_catch_up_and_further_forwards() -> None:
    """As long as all steps made the same number, these count alike."""
    found, line = DraftingSeconds(), 0.02 + 0.001 * np.arange(17)
    for forwards in (17, 17, *(3, 5, 7) * 20):
        found.observe(4, forwards, float(line[forwards - 1]))
    further = np.arange(17)
    assert found.of(4, further) == pytest.approx(line, rel=0.1)
    assert found.of(4, 3.0) == found.of(4, further)[3]
    assert found.of(64, further) == pytest.approx(found.of(4, further)), "the most similar batches"
    found.observe(1, 5, 0.05)
    assert found.of(1, np.arange(2)) == pytest.approx([0.01, 0.02])


ROWS = (1, 2, 4, 8)
SECONDS = (1.0, 1.0, 1.2, 2.0)


def test_a_curve_goes_through_what_was_measured_and_on_behind_it() -> None:
    seconds = RowCost(ROWS, SECONDS, 12).seconds()
    assert seconds[list(ROWS)] == pytest.approx(SECONDS)
    assert seconds[3] == pytest.approx(1.1)
    assert seconds[12] == pytest.approx(2.8)


@settings(deadline=None)
@given(
    st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(1, 40), st.floats(1e-3, 100)), max_size=20),
)
def test_more_rows_never_cost_less(
    measured: list[float], observed: list[tuple[int, float]]
) -> None:
    cost = RowCost(ROWS, tuple(measured), 12)
    for rows, took in observed:
        cost.observe(rows, took)
    seconds = cost.seconds()
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    assert (np.diff(seconds) >= 0).all()


def test_a_curve_that_was_measured_too_steep_is_flattened_where_no_step_has_been() -> None:
    rows = (1, 2, 4, 8, 16)
    cost = RowCost(rows, tuple(0.5 + 0.5 * n for n in rows), 16)
    for _ in range(100):
        cost.observe(2, 1.0)
        cost.observe(4, 1.1)
    seconds = cost.seconds()
    assert seconds[4] == pytest.approx(1.1, rel=0.05)
    assert seconds[16] < 4.5


def test_every_row_costs_more_with_the_context() -> None:
    cost = RowCost(ROWS, SECONDS, 12, of_position=1e-3)
    without, of_rows = cost.seconds(), 0.1 * np.arange(13)
    assert cost.seconds(context=100) == pytest.approx(without + of_rows)
    for _ in range(50):
        cost.observe(4, 1.2 + of_rows[4], context=100)
    assert cost.seconds() == pytest.approx(without), "the machine is as it was measured"
    for _ in range(50):
        cost.observe(4, 1.2 + of_rows[4])  # Control: the context is not given.
    assert cost.seconds()[4] > 1.1 * without[4]


def test_one_interrupted_step_moves_the_cost_little() -> None:
    cost = RowCost(ROWS, SECONDS, 12)
    for _ in range(50):
        cost.observe(4, 1.2)
    assert cost.observe(4, 1000.0) == pytest.approx(1.2, rel=0.05), "what was expected"
    assert cost.seconds()[4] < 1.2 * 1.1
    assert followed(1.0, 1000.0) < 1.1
    assert followed(1.0, 1.0) == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.floats(-1, 1)), min_size=1, max_size=60))
def test_level_and_tilt_are_those_of_least_squares(seen: list[tuple[int, float]]) -> None:
    """The judge solves the weighted equations of all observations at once."""
    measured, prior, kept = (5.0, 25.0), (0.01, 1.0), np.exp(-1 / MEMORY)
    found = LevelAndTilt(measured, prior)
    for rows, moved in seen:
        found.observe(rows, moved)
    logs = np.log(np.maximum([rows for rows, _ in seen], 1))
    points, moved = np.stack([np.ones(len(seen)), logs], axis=1), np.array([y for _, y in seen])
    weights = kept ** np.arange(len(seen))[::-1]
    held = kept ** len(seen) * np.diag(measured) + (1 - kept) * weights.sum() * np.diag(prior)
    level, tilt = np.linalg.solve(
        held + (points.T * weights) @ points, (points.T * weights) @ moved
    )
    for rows in (0, 1, 17, 300):
        expected = level + tilt * np.log(max(rows, 1))
        assert found.moved(rows) == pytest.approx(expected, abs=1e-7)


def test_rows_that_were_not_seen_may_cost_less_and_seen_ones_hardly() -> None:
    cost = RowCost(ROWS, SECONDS, 200)
    for _ in range(100):
        cost.observe(4, 1.2)
    may_cost = cost.seconds(optimism=2.0) / cost.seconds()
    assert may_cost[4] > 0.9
    assert may_cost[150] < 0.8


def test_one_observation_of_rows_that_were_measured_wrongly_puts_them_right() -> None:
    """Those near them follow in part, and those that are known well stay."""
    cost = RowCost((1, 8, 9, 64), (1.0, 1.0, 2.0, 2.0), 64)
    for _ in range(100):
        cost.observe(4, 1.0)
    cost.observe(32, 1.0)
    seconds = cost.seconds()
    assert seconds[32] < 1.3
    assert seconds[40] < 1.5
    assert seconds[4] == pytest.approx(1.0, rel=0.2)


def test_a_measurement_that_was_disturbed_does_not_make_its_neighbours_cheap() -> None:
    """A step over 8 rows that took longer than one over 16 says that it was interrupted. Control:
    a step over 8 rows that was measured right and became faster makes them cheaper."""
    disturbed = RowCost((1, 8, 16), (1.0, 3.0, 1.0), 16)
    faster = RowCost((1, 8, 16), (1.0, 3.0, 3.0), 16)
    for _ in range(10):
        disturbed.observe(8, 1.0)
        faster.observe(8, 1.0)
    assert disturbed.seconds()[1] == pytest.approx(1.0, rel=0.01)
    assert faster.seconds()[1] < 0.7


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(0, 4), st.randoms(use_true_random=False))
def test_worth_is_the_mean_sum_of_the_first_nodes_that_few_forwards_reach(
    trees: int, forwards: int, random: Any
) -> None:
    chances = np.array([[random.random() for _ in range(7)] for _ in range(trees)])
    needed = np.array([[random.randint(0, 5) for _ in range(7)] for _ in range(trees)])
    sizes = (0, 1, 3, 7)
    found = worth_by_forwards(chances, needed, forwards, sizes)
    for most in range(forwards + 1):
        for size, worth in zip(sizes, found[most], strict=True):
            sums = [tree[need <= most][:size].sum() for tree, need in zip(chances, needed)]  # noqa: B905
            assert worth == pytest.approx(np.mean(sums))
