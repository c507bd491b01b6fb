"""The adaptive node budget: its choice is the best there is, and what it rests on stays sound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyntree_plugin.options import DynTreeOptions
from dyntree_plugin.tree.budget.choice import Drafting, best_cut, best_drafting, draft_pays
from dyntree_plugin.tree.budget.row_cost import LARGEST_SURPRISE, RowCost, followed

CHANCES = st.lists(st.floats(0, 1), min_size=4, max_size=4).map(lambda v: sorted(v, reverse=True))
BATCHES = st.lists(CHANCES, min_size=1, max_size=3).map(np.array)
STEPS = st.lists(st.floats(0, 0.5), min_size=20, max_size=20)
"""How much each further row adds to a step's seconds."""


def curve(steps: list[float]) -> np.ndarray:
    return 1.0 + np.cumsum(steps)


def rate(values: np.ndarray, counts: tuple[int, ...], seconds: np.ndarray, spent: float) -> float:
    tokens = len(counts) + sum(row[:count].sum() for row, count in zip(values, counts, strict=True))
    return float(tokens / (spent + seconds[len(counts) + sum(counts)]))


@given(BATCHES, STEPS, st.floats(0, 2))
def test_no_other_cut_makes_more_tokens_per_second(
    values: np.ndarray, steps: list[float], spent: float
) -> None:
    seconds = curve(steps)
    found = best_cut(values, seconds, spent)
    nodes = range(values.shape[1] + 1)
    best = max(
        rate(values, counts, seconds, spent)
        for counts in itertools.product(nodes, repeat=len(values))
    )
    assert found.rate == pytest.approx(best)
    assert rate(values, tuple(found.counts), seconds, spent) == pytest.approx(best)


@given(BATCHES, STEPS, st.floats(0, 2), st.floats(0, 5))
def test_no_other_cut_makes_more_beyond_what_its_time_is_worth(
    values: np.ndarray, steps: list[float], spent: float, worth: float
) -> None:
    seconds = curve(steps)
    found = best_cut(values, seconds, spent, worth)

    def beyond(counts: tuple[int, ...]) -> float:
        took = spent + seconds[len(counts) + sum(counts)]
        return rate(values, counts, seconds, spent) * took - worth * took

    nodes = range(values.shape[1] + 1)
    best = max(map(beyond, itertools.product(nodes, repeat=len(values))))
    assert beyond(tuple(found.counts)) == pytest.approx(best, abs=1e-6)


def test_trees_that_differ_make_more_together_by_the_usual_rate() -> None:
    """The control: each step's own best ratio makes less over many steps."""
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


def test_each_request_for_itself_would_choose_worse() -> None:
    """The control: what the cut gains by looking at the whole batch."""
    values = np.array([[0.9, 0.8, 0.7, 0.6], [0.3, 0.2, 0.1, 0.1]])
    seconds = 1.0 + 0.25 * np.arange(20)
    together = best_cut(values, seconds, 0.0)
    alone = tuple(int(best_cut(row[None], seconds, 0.0).counts[0]) for row in values)
    assert together.counts[0] > together.counts[1]
    assert rate(values, alone, seconds, 0.0) < together.rate


def test_rows_that_cost_nothing_are_all_taken_and_padding_never_is() -> None:
    values = np.array([[0.5, 0.25, 0.0, 0.0], [0.1, 0.1, 0.1, 0.0]])
    assert best_cut(values, np.ones(20), 0.0).counts.tolist() == [2, 3]


def test_no_more_rows_are_taken_than_a_step_holds() -> None:
    values = np.array([[0.5, 0.25, 0.1], [0.4, 0.3, 0.2]])
    assert best_cut(values, np.ones(6), 0.0).counts.tolist() == [1, 2]
    assert best_cut(values, np.ones(3), 0.0).counts.tolist() == [0, 0]


def test_rows_that_cost_too_much_leave_plain_decoding() -> None:
    seconds = np.arange(20) + 1e-6
    found = best_cut(np.full((2, 4), 0.5), seconds, 0.0)
    assert found.counts.tolist() == [0, 0]
    assert found.tokens == 2


def test_of_equal_values_a_request_gives_its_first_nodes() -> None:
    seconds = np.array([9.0, 9, 9, 9, 9, 99, 99, 99, 99, 99, 99])
    found = best_cut(np.full((2, 4), 0.5), seconds, 0.0)
    assert sorted(found.counts.tolist()) == [0, 2]


def test_of_equal_cuts_the_smallest_is_taken() -> None:
    # One token per second with any number of nodes.
    assert best_cut(np.array([[1.0, 1.0]]), np.array([0.0, 1, 2, 3]), 0.0).counts.tolist() == [0]


def test_time_that_is_spent_anyway_makes_more_nodes_pay() -> None:
    values, seconds = np.array([[0.9, 0.6, 0.4, 0.2]]), 1.0 + 0.3 * np.arange(6)
    counts = [best_cut(values, seconds, spent).counts[0] for spent in (0.0, 1.0, 5.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_one_size_for_all_is_the_best_of_those_there_are() -> None:
    ranked, seconds = np.array([0.9, 0.7, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), 1 + 0.1 * np.arange(40)
    sizes = (1, 2, 4, 8)
    for requests in (1, 2, 4):
        found = best_size(ranked, requests, seconds, sizes)
        assert found == max(
            sizes, key=lambda n: rate(np.tile(ranked, (requests, 1)), (n,) * requests, seconds, 0.0)
        )
    assert best_size(ranked, 1, seconds, sizes) > best_size(ranked, 4, seconds, sizes)


def best_size(
    ranked: np.ndarray, requests: int, seconds: np.ndarray, sizes: tuple[int, ...]
) -> int:
    """Where trees are drafted already, which are worth what their nodes are by rank."""
    worth = np.concatenate([[0.0], ranked.cumsum()])[None, list(sizes)]
    return best_drafting(worth, requests, seconds, 0.0, sizes).nodes


def test_of_one_size_for_all_trees_what_does_not_fit_into_a_step_takes_another() -> None:
    ranked, seconds = np.full(8, 0.2), np.ones(20)
    assert best_size(ranked, 2, seconds, (1, 2, 4, 8)) == 8
    assert best_size(ranked, 6, seconds, (1, 2, 4, 8)) == 2


WORTHS = st.lists(st.lists(st.floats(0, 8), min_size=4, max_size=4), min_size=1, max_size=5).map(
    lambda rows: np.array(rows).cumsum(axis=0).cumsum(axis=1)
)


@given(WORTHS, STEPS.map(curve), st.floats(0, 2), st.integers(1, 4))
def test_no_other_number_of_forwards_and_nodes_makes_more_tokens_per_second(
    worth: np.ndarray, seconds: np.ndarray, forward: float, requests: int
) -> None:
    sizes = (0, 1, 2, 4)
    worth[:, 0] = 0.0

    def rate_of(choice: Drafting) -> float:
        rows = requests * (1 + choice.nodes)
        held = min(rows, len(seconds) - 1)
        took = seconds[held] * rows / held + forward * (1 + choice.forwards)
        return float((1 + worth[choice.forwards, sizes.index(choice.nodes)]) / took)

    every = range(len(worth))
    for allowed in (None, every[-1:]):
        found = best_drafting(worth, requests, seconds, forward, sizes, allowed)
        choices = [Drafting(f, n) for f in allowed or every for n in sizes]
        assert rate_of(found) == pytest.approx(max(map(rate_of, choices)))


def test_forwards_that_cost_more_are_fewer_and_trees_that_cost_too_much_are_none() -> None:
    worth = np.array([[0, 0.6, 0.8], [0, 0.6, 1.1], [0, 0.6, 1.3]])
    seconds = 1 + 0.01 * np.arange(100)

    def found(forward: float, requests: int = 1, row: float = 1.0) -> Drafting:
        return best_drafting(worth, requests, seconds**row, forward, (0, 1, 2))

    assert found(0.01) == Drafting(2, 2)
    assert found(0.15) == Drafting(1, 2)
    assert found(0.5) == Drafting(0, 2)
    assert found(0.5, requests=40, row=6.0) == Drafting(0, 0)


@pytest.mark.parametrize(
    ("values", "seconds", "said"),
    [
        (np.array([[0.1, 0.2]]), np.ones(9), "rise"),
        (np.array([[0.2, 0.1], [0.2, 0.1]]), np.ones(2), "2 entries for 2 requests"),
        (np.array([[0.2, 0.1]]), np.zeros(9), "some time"),
    ],
)
def test_what_is_no_tree_or_no_time_is_refused(
    values: np.ndarray, seconds: np.ndarray, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        best_cut(values, seconds, 0.0)


def test_drafting_ends_where_its_time_earns_more_elsewhere() -> None:
    frontier = np.array([0.2, 0.1])
    assert draft_pays(frontier, 0.0, 1.0, rate=0.29)
    assert not draft_pays(frontier, 0.0, 1.0, rate=0.31)
    # A row costs what the second node could earn.
    assert not draft_pays(frontier, 0.5, 0.5, rate=0.25)
    assert not draft_pays(np.zeros(2), 0.0, 1e-9, rate=1.0)


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


def test_a_point_that_was_measured_wrong_is_put_right() -> None:
    cost = RowCost(ROWS, (1.0, 1.0, 3.0, 3.1), 8)
    for _ in range(200):
        cost.observe(4, 1.2)
        cost.observe(2, 1.0)
    assert cost.seconds()[4] == pytest.approx(1.2, rel=0.1)
    assert cost.seconds()[2] == pytest.approx(1.0, rel=0.1)


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
    ("options", "said"),
    [
        ({"growth": "dyspec"}, "budget=adaptive is biased with rule=without_replacement"),
        ({"growth": "dyspec", "rule": "match"}, "budget=adaptive is for growth=topk, not dyspec"),
        ({"growth": "chain"}, "budget=adaptive is for growth=topk, not chain"),
        (
            {"growth": "expansion", "expansion": [2]},
            "budget=adaptive is biased with rule=multi_step",
        ),
    ],
)
def test_trees_that_it_cannot_cut_are_refused_by_name(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=f"dyntree.{said}"):
        DynTreeOptions.parse({"budget": "adaptive", **options}).resolve(8)


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


@pytest.mark.parametrize("options", [{}, {"budget": "adaptive"}])
def test_trees_may_be_deeper_where_drafting_ends_by_itself(options: dict[str, object]) -> None:
    def depth(nodes: int, *, drafting_ends: bool = True, **more: object) -> int:
        parsed = DynTreeOptions.parse(options | more)
        return parsed.resolve(nodes, drafting_ends=drafting_ends).shape.max_depth

    assert (depth(12), depth(64)) == (12, 16)
    assert depth(12, max_depth=4) == 4
    fixed = DynTreeOptions(budget="fixed").resolve(12).shape.max_depth
    assert depth(12, drafting_ends=False) == fixed < 12
