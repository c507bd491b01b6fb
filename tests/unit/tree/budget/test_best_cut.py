"""Cuts of single trees, and the end of their growth, compared with every other choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget import CURVES

from dyntree_plugin.tree.budget.choice import best_cut, frontier_gain

CHANCES = st.lists(st.floats(0, 1), min_size=4, max_size=4).map(lambda v: sorted(v, reverse=True))
BATCHES = st.lists(CHANCES, min_size=1, max_size=3).map(np.array)


def rate(values: np.ndarray, counts: tuple[int, ...], seconds: np.ndarray, spent: float) -> float:
    tokens = len(counts) + sum(row[:count].sum() for row, count in zip(values, counts, strict=True))
    return float(tokens / (spent + seconds[len(counts) + sum(counts)]))


@settings(deadline=None)
@given(BATCHES, CURVES, st.floats(0, 2))
def test_no_other_cut_makes_more_tokens_per_second(
    values: np.ndarray, seconds: np.ndarray, spent: float
) -> None:
    found = best_cut(values, seconds, spent)
    nodes = range(values.shape[1] + 1)
    best = max(
        rate(values, counts, seconds, spent)
        for counts in itertools.product(nodes, repeat=len(values))
    )
    assert found.rate == pytest.approx(best)
    assert rate(values, tuple(found.counts), seconds, spent) == pytest.approx(best)


@settings(deadline=None)
@given(BATCHES, CURVES, st.floats(0, 2), st.floats(0, 5))
def test_no_other_cut_makes_more_tokens_beyond_what_its_time_is_worth(
    values: np.ndarray, seconds: np.ndarray, spent: float, worth: float
) -> None:
    found = best_cut(values, seconds, spent, worth)

    def beyond(counts: tuple[int, ...]) -> float:
        took = spent + seconds[len(counts) + sum(counts)]
        return rate(values, counts, seconds, spent) * took - worth * took

    nodes = range(values.shape[1] + 1)
    best = max(map(beyond, itertools.product(nodes, repeat=len(values))))
    assert beyond(tuple(found.counts)) == pytest.approx(best, abs=1e-6)


def test_trees_that_differ_make_more_together_at_the_usual_rate() -> None:
    """Control: the best ratio of each single step makes less over many steps."""
    rng, seconds = np.random.default_rng(0), 1 + 0.1 * np.arange(20)
    trees = [np.cumprod(rng.uniform(low, 1, (1, 16)), axis=1) for low in (0.1, 0.8) * 50]

    def overall(worth: float | None) -> float:
        cuts = [best_cut(tree, seconds, 0.0, worth) for tree in trees]
        return sum(cut.tokens for cut in cuts) / sum(cut.seconds for cut in cuts)

    own = overall(None)
    usual = own
    for _ in range(5):
        usual = overall(usual)
    assert usual > 1.005 * own


def test_a_cut_has_no_more_rows_than_a_step_holds() -> None:
    values = np.array([[0.5, 0.25, 0.1], [0.4, 0.3, 0.2]])
    assert best_cut(values, np.ones(6), 0.0).counts.tolist() == [1, 2]
    assert best_cut(values, np.ones(3), 0.0).counts.tolist() == [0, 0]


def test_a_forward_earns_what_its_nodes_are_worth_beyond_their_rows() -> None:
    frontier = np.array([0.2, 0.1, 0.0])
    assert frontier_gain(frontier, 0.0) == pytest.approx(0.3)
    assert frontier_gain(frontier, 0.15) == pytest.approx(0.05), "the second costs more"
