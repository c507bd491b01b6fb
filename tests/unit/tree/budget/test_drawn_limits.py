"""How many nodes of drawn trees are verified: an end never depends on what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from dyntree_plugin.tree.budget.choice import best_cut
from dyntree_plugin.tree.budget.drawn import least_values, valued_counts


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


def test_limits_fill_a_block_of_rows() -> None:
    """Where the next block does not pay, its first row is dear, and those of this one are cheap."""
    seconds, usual = 0.1 * (1 + np.arange(60) // 16), 0.8 ** np.arange(1, 41)
    least = least_values(usual, 1, seconds, 20.0)
    assert (least[:14] < 0.01).all()
    assert least[14] > usual[14]
    cheap = least_values(usual, 1, seconds, 1.0)
    assert cheap[14] < usual[14]
    assert len(least_values(usual, 1, seconds[:9], 20.0)) == 7
