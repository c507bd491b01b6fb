"""The adaptive node budget: its choice is the best there is, and what it rests on stays sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.budget.choice import Choice, best_drafting
from dyntree_plugin.tree.budget.row_cost import (
    LARGEST_SURPRISE,
    MEMORY,
    LevelAndTilt,
    RowCost,
    followed,
)
from dyntree_plugin.tree.budget.worth import worth_by_forwards

STEPS = st.lists(st.floats(0, 0.5), min_size=20, max_size=20)
"""How much each further row adds to a step's seconds."""


def curve(steps: list[float]) -> np.ndarray:
    return 1.0 + np.cumsum(steps)


def rate(ranked: np.ndarray, size: int, requests: int, seconds: np.ndarray) -> float:
    """Tokens per second of a step that verifies so many nodes of each request."""
    return float(requests * (1 + ranked[:size].sum()) / seconds[requests * (1 + size)])


def test_one_size_for_all_is_the_best_of_those_there_are() -> None:
    ranked, seconds = np.array([0.9, 0.7, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), 1 + 0.1 * np.arange(40)
    sizes = (1, 2, 4, 8)
    for requests in (1, 2, 4):
        found = best_size(ranked, requests, seconds, sizes)
        assert found == max(sizes, key=lambda size: rate(ranked, size, requests, seconds))
    assert best_size(ranked, 1, seconds, sizes) > best_size(ranked, 4, seconds, sizes)


def best_size(
    ranked: np.ndarray, requests: int, seconds: np.ndarray, sizes: tuple[int, ...]
) -> int:
    """Where trees are drafted already, which are worth what their nodes are by rank."""
    worth = np.concatenate([[0.0], ranked.cumsum()])[None, list(sizes)]
    return best_drafting(worth, requests, seconds, 0.0, sizes).nodes


WORTHS = st.lists(st.lists(st.floats(0, 8), min_size=4, max_size=4), min_size=1, max_size=5).map(
    lambda rows: np.array(rows).cumsum(axis=0).cumsum(axis=1)
)


@given(WORTHS, STEPS.map(curve), st.floats(0, 2), st.integers(1, 4))
def test_no_other_number_of_forwards_and_nodes_makes_more_tokens_per_second(
    worth: np.ndarray, seconds: np.ndarray, forward: float, requests: int
) -> None:
    sizes = (0, 1, 2, 4)
    worth[:, 0] = 0.0

    def rate_of(choice: Choice) -> float:
        rows = requests * (1 + choice.nodes)
        held = min(rows, len(seconds) - 1)
        took = seconds[held] * rows / held + forward * (1 + choice.forwards)
        return float((1 + worth[choice.forwards, sizes.index(choice.nodes)]) / took)

    every = range(len(worth))
    for allowed in (None, every[-1:]):
        found = best_drafting(worth, requests, seconds, forward, sizes, allowed)
        choices = [Choice(f, n) for f in allowed or every for n in sizes]
        assert rate_of(found) == pytest.approx(max(map(rate_of, choices)))


ROWS = (1, 2, 4, 8)
SECONDS = (1.0, 1.0, 1.2, 2.0)


def test_a_curve_goes_through_what_was_measured_and_on_behind_it() -> None:
    seconds = RowCost(ROWS, SECONDS, 12).seconds()
    assert seconds[list(ROWS)] == pytest.approx(SECONDS)
    assert seconds[3] == pytest.approx(1.1)
    assert seconds[12] == pytest.approx(2.8)


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


def test_a_machine_that_slows_down_is_followed_at_every_number_of_rows() -> None:
    cost = RowCost(ROWS, SECONDS, 12)
    for _ in range(100):
        cost.observe(4, 2.4)
    assert cost.seconds()[4] == pytest.approx(2.4, rel=0.02)
    assert cost.seconds()[1] > 1.5


def test_a_curve_that_was_measured_too_steep_is_flattened_where_no_step_has_been() -> None:
    rows = (1, 2, 4, 8, 16)
    cost = RowCost(rows, tuple(0.5 + 0.5 * n for n in rows), 16)
    for _ in range(100):
        cost.observe(2, 1.0)
        cost.observe(4, 1.1)
    seconds = cost.seconds()
    assert seconds[4] == pytest.approx(1.1, rel=0.05)
    assert seconds[16] < 4


def test_one_interrupted_step_moves_the_cost_little() -> None:
    cost = RowCost(ROWS, SECONDS, 12)
    cost.observe(4, 1000.0)
    assert cost.seconds()[4] < 1.2 * np.exp(LARGEST_SURPRISE * 0.4)
    assert followed(1.0, 1000.0) < 1.1
    assert followed(1.0, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "seconds"), [((2, 4), (1.0, 1.0)), ((1, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1,), ())]
)
def test_what_is_no_curve_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"rows=|seconds="):
        RowCost(rows, seconds, 4)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, "adaptive"),
        ({"rule": "match", "min_value": 0.1}, "adaptive"),
        ({"coupling": "off", "calibration": "off"}, "adaptive"),
        ({"budget": "fixed"}, "fixed"),
        ({"growth": "chain"}, "fixed"),
        ({"growth": "dyspec"}, "fixed"),
        ({"growth": "dyspec", "rule": "match"}, "fixed"),
    ],
)
def test_a_budget_is_adaptive_unless_it_is_said_or_has_to_be_otherwise(
    options: dict[str, object], budget: str
) -> None:
    assert DynTreeOptions.parse(options).resolve(8).in_force()["budget"] == budget


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
    assert found.curve(logs) == pytest.approx(level + tilt * logs, abs=1e-7)


def test_the_first_rows_of_a_curve_look_no_further() -> None:
    rising, falling = RowCost(ROWS, SECONDS, 40), RowCost(ROWS, (1.0, 1.0, 1.2, 0.5), 40)
    for most in (0, 5, 40, 99):
        assert rising.seconds(most) == pytest.approx(rising.seconds()[: most + 1])
    assert falling.seconds(4)[4] == pytest.approx(1.2)
    assert falling.seconds()[4] == falling.seconds(8)[4] == pytest.approx(0.5)


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
