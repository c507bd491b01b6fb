"""How many tokens of drawn chains are verified: an end never depends on what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from dyntree_plugin.tree.budget.chains import (
    ChainLimits,
    Limits,
    level_counts,
    valued_counts,
)
from dyntree_plugin.tree.budget.choice import best_cut

CHAINS = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.0], [0.95, 0.1, 0.05, 0.01]])


def test_chains_end_where_a_token_is_worth_too_little() -> None:
    assert level_counts(CHAINS, Limits(0.35, 12)).tolist() == [4, 2, 1]


def test_room_goes_to_the_first_levels_and_there_to_the_most_likely_tokens() -> None:
    assert level_counts(CHAINS, Limits(0.0, 3)).tolist() == [1, 1, 1]
    assert level_counts(CHAINS, Limits(0.0, 5)).tolist() == [2, 2, 1]
    assert level_counts(CHAINS, Limits(0.0, 2)).tolist() == [1, 0, 1]


@pytest.mark.parametrize("seed", range(8))
def test_whether_a_token_is_verified_depends_on_no_later_level(seed: int) -> None:
    """Tokens of later levels are drawn later, and their values tell of them."""
    made = np.random.default_rng(seed)
    chances = np.minimum.accumulate(made.random((5, 6)), axis=1)
    limits = Limits(float(made.random() * 0.5), int(made.integers(1, 30)))
    counts = level_counts(chances, limits)
    for level in range(1, 6):
        other = chances.copy()
        other[:, level:] = np.minimum(made.random((5, 6 - level)), chances[:, level - 1 : level])
        again = level_counts(other, limits)
        assert (np.minimum(again, level) == np.minimum(counts, level)).all()


@pytest.mark.parametrize("seed", range(8))
def test_whether_a_node_of_a_drawn_tree_is_verified_depends_on_no_node_of_less_value(
    seed: int,
) -> None:
    """What a node draws changes the values of such nodes."""
    made = np.random.default_rng(seed)
    chances = -np.sort(-made.random((5, 6)), axis=1)
    limits = Limits(float(made.random() * 0.5), int(made.integers(1, 30)))
    counts = valued_counts(chances, limits)
    assert 0 < counts.sum() <= limits.nodes
    assert (chances[np.arange(6) < counts[:, None]] >= limits.least).all()
    for value in chances.ravel():
        other = np.where(chances < value, -np.sort(-value * made.random((5, 6))), chances)
        again = np.arange(6) < valued_counts(other, limits)[:, None]
        before = np.arange(6) < counts[:, None]
        assert (again == before)[chances >= value].all()


def test_trees_are_cut_by_what_follows() -> None:
    """Control of the test above: rows that many nodes share are worth it for many nodes alone."""
    dear = np.array([0.1, 0.1, 0.1, 0.14, 0.14, 0.14, 0.14])
    few, many = np.array([[0.9, 0.3, 0.0, 0.0, 0.0]]), np.array([[0.9, 0.3, 0.3, 0.3, 0.3]])
    assert best_cut(few, dear, 0.0, 15.0).counts.tolist() == [1]
    assert best_cut(many, dear, 0.0, 15.0).counts.tolist() == [5]


def blocks(fast: float, jump: float, rows: int = 200) -> np.ndarray:
    """Return seconds by rows of kernels that take 16 rows at a time."""
    return fast + jump * (np.maximum(np.arange(rows) - 1, 0) // 16)


def learned(chances: np.ndarray, times: int = 200) -> ChainLimits:
    found = ChainLimits(chances.shape[1])
    for _ in range(times):
        found.cut(chances, np.ones(len(chances), dtype=bool), np.full(200, 0.1), 0.0)
    return found


def test_limits_fill_a_block_of_rows() -> None:
    found = learned(0.8 ** np.arange(1, 17)[None].repeat(4, axis=0))
    for jump, rows in ((0.01, 48), (0.04, 16)):
        limits, rate = found.of(4, 16, blocks(0.08, jump), 0.0)
        assert limits.nodes + 4 == rows
        # Control: one row more or less makes fewer tokens per second.
        for other in (rows - 1, rows + 1):
            of_each = (0.8 ** np.arange(1, 17)).repeat(4)[: other - 4].sum()
            assert (4 + of_each) / blocks(0.08, jump)[other] < rate


def test_a_chain_goes_on_at_the_usual_ratio_where_it_was_not_drafted() -> None:
    """Otherwise chains whose drafting ended early would never become longer."""
    short = 0.8 ** np.arange(1, 17)[None]
    short[:, 6:] = 0
    limits, _ = learned(short).of(1, 16, blocks(0.08, 0.02), 0.0)
    assert limits.nodes == 15


def test_trees_are_not_extended_and_chains_to_their_depth_alone() -> None:
    found, same = ChainLimits(3), np.array([[0.9, 0.8, 0.0, 0.0]]).repeat(2, axis=0)
    found.cut(same, np.array([False, True]), np.full(20, 0.1), 0.0)
    limits, _ = found.of(2, 4, np.full(20, 0.1), 0.0)
    assert limits.nodes == 2 + 3


def test_a_batch_of_a_new_size_is_cut_as_one_of_the_nearest() -> None:
    """If it were verified whole, an engine whose requests end one by one would do so each time."""
    fast = np.array([[0.8, 0.6, 0.05, 0.02]]).repeat(16, axis=0)
    found, dear = learned(fast), 0.5 + 0.01 * np.arange(100)
    assert [found.of(requests, 4, dear, 0.0)[0].nodes for requests in (16, 15, 8)] == [32, 30, 16]


def test_rows_that_cost_more_than_any_token_earns_are_left_out() -> None:
    limits, rate = learned(CHAINS).of(3, 4, np.arange(50) * 1.0, 0.0)
    assert limits == Limits(1.0, 0)
    assert rate == 1.0
