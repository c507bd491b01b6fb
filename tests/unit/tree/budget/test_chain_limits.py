"""How many tokens of drawn chains are verified: an end never depends on what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from dyntree_plugin.tree.budget.chains import (
    ChainRatio,
    Prices,
    going_on,
    least_values,
    level_counts,
    valued_counts,
)
from dyntree_plugin.tree.budget.choice import best_cut

CHAINS = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.0], [0.95, 0.1, 0.05, 0.01]])


def prices(seconds: np.ndarray, ratio: float = 0.5, forward: float = 0.0) -> Prices:
    """Prices at which a second is worth one token."""
    return Prices(seconds, forward, 1.0, ratio)


def test_chains_end_where_a_token_is_worth_too_little() -> None:
    assert level_counts(CHAINS, 3, prices(0.35 * np.arange(20))).tolist() == [4, 2, 1]


def test_room_goes_to_the_first_levels_and_there_to_the_most_likely_tokens() -> None:
    free = np.ones(20)
    assert level_counts(CHAINS, 3, prices(free[:7], 0.4)).tolist() == [1, 1, 1]
    assert level_counts(CHAINS, 3, prices(free[:9], 0.4)).tolist() == [2, 2, 1]
    assert level_counts(CHAINS, 3, prices(free[:6], 0.4)).tolist() == [1, 0, 1]


def test_a_row_that_does_not_pay_alone_pays_with_those_that_share_its_block() -> None:
    """Control: at another ratio no later token is likely."""
    of_four = 1.2 * (np.arange(20) // 4)
    one = np.array([[0.9, 0.8, 0.7, 0.6, 0.1, 0.1, 0.1, 0.1]])
    assert level_counts(one, 3, prices(of_four, 0.8)).tolist() == [4]
    assert level_counts(one, 3, prices(of_four, 0.1)).tolist() == [0]


def test_a_token_that_is_to_be_drafted_has_to_pay_for_the_forward() -> None:
    given = np.array([0.9]), 4, 1
    for drafted in (True, False):
        free = np.ones(20)
        assert going_on(*given, prices(free, forward=0.5), drafted=drafted).all()
        assert going_on(*given, prices(free, forward=2.0), drafted=drafted).all() == drafted


@pytest.mark.parametrize("seed", range(8))
def test_whether_a_token_is_verified_depends_on_no_later_level(seed: int) -> None:
    """Tokens of later levels are drawn later, and their values tell of them."""
    made = np.random.default_rng(seed)
    chances = np.minimum.accumulate(made.random((5, 6)), axis=1)
    seconds = np.maximum.accumulate(0.3 * np.arange(40) + made.random(40))
    given = 5, prices(seconds, float(made.random()), 0.1)
    counts = level_counts(chances, *given)
    assert 0 < counts.sum() < 30
    for level in range(1, 6):
        other = chances.copy()
        other[:, level:] = np.minimum(made.random((5, 6 - level)), chances[:, level - 1 : level])
        again = level_counts(other, *given)
        assert (np.minimum(again, level) == np.minimum(counts, level)).all()


@pytest.mark.parametrize("seed", range(8))
def test_whether_a_node_of_a_drawn_tree_is_verified_depends_on_no_node_of_less_value(
    seed: int,
) -> None:
    """What a node draws changes the values of such nodes."""
    made = np.random.default_rng(seed)
    chances = -np.sort(-made.random((5, 6)), axis=1)
    least = np.sort(made.random(20)) * 0.8
    counts = valued_counts(chances, least)
    assert 0 < counts.sum() <= 20
    kept = np.sort(chances[np.arange(6) < counts[:, None]])[::-1]
    assert (kept >= least[: len(kept)]).all()
    for value in chances.ravel():
        other = np.where(chances < value, -np.sort(-value * made.random((5, 6))), chances)
        again = np.arange(6) < valued_counts(other, least)[:, None]
        before = np.arange(6) < counts[:, None]
        assert (again == before)[chances >= value].all()


def test_trees_are_cut_by_what_follows() -> None:
    """Control of the test above: rows that many nodes share are worth it for many nodes alone."""
    dear = np.array([0.1, 0.1, 0.1, 0.14, 0.14, 0.14, 0.14])
    few, many = np.array([[0.9, 0.3, 0.0, 0.0, 0.0]]), np.array([[0.9, 0.3, 0.3, 0.3, 0.3]])
    assert best_cut(few, dear, 0.0, 15.0).counts.tolist() == [1]
    assert best_cut(many, dear, 0.0, 15.0).counts.tolist() == [5]


def test_the_ratio_is_that_of_tokens_that_were_drawn() -> None:
    """A chain that was not drafted further says nothing of its next token."""
    found = ChainRatio()
    for _ in range(200):
        found.observe(np.array([[0.8, 0.4, 0.2, 0.0], [0.4, 0.0, 0.0, 0.0]]))
    assert found.value == pytest.approx(0.5)


@pytest.mark.parametrize("forward", [0.0, 0.3])
def test_the_first_rate_is_that_of_the_best_length(forward: float) -> None:
    found, seconds = ChainRatio(), 0.1 + 0.05 * np.arange(40)
    rates = [
        2 * (0.8 ** np.arange(1 + n)).sum() / (forward + seconds[2 * (1 + n)]) for n in range(9)
    ]
    assert found.rate(2, 8, seconds, forward) == pytest.approx(max(rates))
    assert found.rate(2, 1, seconds, forward) == pytest.approx(max(rates[:2]))


def test_limits_fill_a_block_of_rows() -> None:
    """Where the next block does not pay, its first row is dear, and those of this one are cheap."""
    seconds, usual = 0.1 * (1 + np.arange(60) // 16), 0.8 ** np.arange(1, 41)
    least = least_values(usual, 1, seconds, 20.0)
    assert (least[:14] < 0.01).all()
    assert least[14] > usual[14]
    cheap = least_values(usual, 1, seconds, 1.0)
    assert cheap[14] < usual[14]
    assert len(least_values(usual, 1, seconds[:9], 20.0)) == 7
