"""Measuring what steps cost, on a fake runner whose steps take a known time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyntree_plugin.engine.start import step_costs
from dyntree_plugin.engine.start.step_costs import (
    PLAIN_SECONDS,
    ROW_SECONDS,
)
from dyntree_plugin.engine.start.timed_steps import most_rows
from dyntree_plugin.engine.step.clock import StageClock
from dyntree_plugin.tree.budget.plain_steps import StepCosts
from dyntree_plugin.tree.budget.row_cost import RowCost

OF_TOKEN, HEAD, SAMPLING = 1e-6, 2e-3, 1e-3
OF_ROW = 4e-7
"""Of the seconds `OF_TOKEN`, those that each row of a request takes for itself."""


class Runner:
    """A fake runner whose steps take ``forward`` seconds and ``row`` for each row, or ``least``.

    The rows fill whole blocks. Tokens of context, the head and sampling take time, too.
    """

    max_num_tokens, max_model_len, decode_query_len = 1000, 2048, 9

    def __init__(
        self,
        now: list[float],
        forward: float = 0.01,
        row: float = 1e-6,
        *,
        least: float = 0.0,
        block: int = 1,
        requests: int = 4,
        nodes: int = 8,
    ) -> None:
        self.max_num_reqs, self.speculator = requests, "drafting"
        self.trees: Any = SimpleNamespace(shape=SimpleNamespace(node_budget=nodes))
        self.clock = StageClock()
        self.model = SimpleNamespace(compute_logits=lambda hidden: self.spend(HEAD))
        self.rows: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self.greedy = 0
        self._now, self._cost = now, (forward, row, block, least)

    def spend(self, seconds: float) -> None:
        self._now[0] += seconds

    def queue_delay(self) -> None:
        assert self.speculator is None, "measured steps must not draft"

    def forward(self, rows: Any) -> Any:
        forward, row, block, least = self._cost
        return np.maximum(forward + row * block * -(-rows // block), least)

    def whole(self, runner_most: int) -> np.ndarray:
        """Return the seconds of forward and head over 1, 2, … rows."""
        return np.asarray(self.forward(np.arange(1, 1 + runner_most)) + HEAD)

    def _dummy_run(
        self, rows: int, context_len: int | None = None, uniform_decode: bool = False
    ) -> tuple[Any, Any]:
        if context_len is None:
            self.rows.append(rows)
        elif not uniform_decode:
            self.steps.append((rows, context_len))
        requests = rows // self.decode_query_len if uniform_decode else rows
        of_context = requests * (OF_TOKEN - OF_ROW) + rows * OF_ROW
        with self.clock("target"):
            self.spend(self.forward(rows) + of_context * (context_len or 0))
        hidden = np.zeros(rows)
        return hidden, hidden


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, which steps alone move; check that plain steps sample greedily."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def sample_plain(runner: Runner, hidden: np.ndarray) -> None:
        assert runner.greedy >= len(hidden), "vLLM's dummy runs enable every sampling option"
        runner.spend(SAMPLING)

    monkeypatch.setattr(
        step_costs, "sample_greedily", lambda runner, requests: vars(runner).update(greedy=requests)
    )
    monkeypatch.setattr(step_costs, "sample_plain", sample_plain)
    return now


def alone(numbers: Any) -> Any:
    return numbers


def measure(runner: Any, agree: Any = alone, closely: bool = True) -> StepCosts:
    return step_costs.measure(runner, agree, closely)


def curve(costs: StepCosts) -> np.ndarray:
    """Return what the budget reads: the seconds of 1, 2, … rows."""
    return RowCost(costs.rows, costs.with_head, costs.most_rows).seconds()[1:]


@pytest.mark.parametrize("closely", [False, True])
def test_one_measurement_says_what_plain_steps_and_rows_cost(
    now: list[float], closely: bool
) -> None:
    runner = Runner(now, requests=100, row=1e-5)
    costs = measure(runner, closely=closely)
    assert costs.requests == (1, 2, 4, 8, 16, 32, 64, 100)
    plain = runner.forward(8) + SAMPLING
    assert costs.seconds(8, 0) == pytest.approx(plain)
    assert costs.seconds(8, 512) == pytest.approx(plain + 8 * 512 * OF_TOKEN)
    assert (costs.rows[0], costs.rows[-1]) == (1, costs.most_rows) == (1, 900)
    assert costs.rows == tuple(sorted({*runner.rows}))
    assert costs.forwards == pytest.approx([runner.forward(rows) for rows in costs.rows])
    assert costs.with_head == pytest.approx([each + HEAD for each in costs.forwards])
    assert curve(costs) == pytest.approx(runner.whole(900))
    assert runner.speculator == "drafting"


@pytest.mark.parametrize("context", [1024, 20])
def test_what_context_adds_to_a_row_is_measured_if_asked(context: int, now: list[float]) -> None:
    runner = Runner(now)
    assert measure(runner).of_position == 0
    runner.max_model_len = context + runner.decode_query_len
    costs = step_costs.measure(runner, alone, closely=True, by_context=True)
    assert costs.of_position == pytest.approx(OF_ROW)


def test_no_forward_has_more_rows_of_a_request_than_its_context_holds(now: list[float]) -> None:
    """The KV cache has no room for more rows, whatever a tree's budget is."""
    runner: Any = Runner(now)
    runner.max_model_len = 5
    costs = measure(runner)
    assert max(runner.rows) == costs.rows[-1] == most_rows(runner) == 4 * 5


@pytest.mark.parametrize(("forward", "row"), [(0.01, 0.2), (0.3, 1e-3), (1.2, 0.03)])
def test_rows_are_measured_within_their_seconds_and_more_lie_on_the_line(
    forward: float, row: float, now: list[float]
) -> None:
    """One row and the rows of one tree are always measured, and at most one more that is slow."""
    runner = Runner(now, forward, row)
    costs = measure(runner)
    before = sum(runner.forward(n) + n * OF_TOKEN * c + SAMPLING for n, c in runner.steps)
    one, tree = runner.forward(1), runner.forward(9)
    assert now[0] - before < 2 * ROW_SECONDS + tree + max(2 * one, ROW_SECONDS)
    assert costs.rows[0] == 1
    assert costs.rows[-1] >= 9
    assert curve(costs) == pytest.approx(runner.whole(36))


@pytest.mark.parametrize(("forward", "block"), [(0.004, 5), (0.08, 16)])
def test_one_row_more_than_a_block_is_known_to_cost_the_next_block(
    forward: float, block: int, now: list[float]
) -> None:
    """A block costs a tenth of a step. Control: rows that are not measured closely."""
    runner = Runner(now, forward - HEAD, 0.1 * forward / block, block=block)
    true = runner.whole(36)
    assert curve(measure(runner)) == pytest.approx(true, rel=0.02)
    assert abs(curve(measure(runner, closely=False)) / true - 1).max() > 0.025


@pytest.mark.parametrize(("disturbed", "refined"), [(range(7, 15), False), (range(7, 999), True)])
def test_steps_that_were_disturbed_are_repeated_before_rows_between_them_are_measured(
    disturbed: range, refined: bool, now: list[float]
) -> None:
    """Control: where the seconds stay as long, there are more rows."""

    class Disturbed(Runner):
        def forward(self, rows: Any) -> Any:
            slow = len(self.rows) in disturbed and np.asarray(rows).max() > 4
            return super().forward(rows) * (2 if slow else 1)

    costs = measure(Disturbed(now, 0.08))
    assert (set(costs.rows) > {1, 2, 4, 8, 16, 32, 36}) == refined
    assert costs.with_head[-1] == pytest.approx((0.16 if refined else 0.08) + HEAD, rel=0.01)


@pytest.mark.parametrize("free", [5, 30])
def test_where_rows_begin_to_cost_beside_a_transfer_is_known(free: int, now: list[float]) -> None:
    """A step takes a transfer of 0.5 s, or longer for its arithmetic. Control: the line from one
    row to the most."""
    runner = Runner(now, 0.0, 0.5 / free, least=0.5)
    costs = measure(runner)
    assert len(runner.rows) == len({*runner.rows})
    true = runner.whole(36)
    line = np.interp(np.arange(1, 37), [1, 36], true[[0, -1]])
    assert abs(curve(costs) / true - 1).max() < 0.25 * abs(line / true - 1).max() + 0.05


@pytest.mark.parametrize(("row", "rows"), [(1e-3, [1, 9, 36]), (0.5, [1, 9])])
def test_offloaded_weights_are_measured_in_a_few_steps(
    row: float, rows: list[int], now: list[float]
) -> None:
    """At 5.6 s per step, which a 70B target takes over PCIe 4. The rows of one tree are among them,
    so that rows that cost much are not taken for free."""
    runner = Runner(now, 5.6, row)
    costs = measure(runner)
    assert costs.requests == (1, 4)
    assert runner.rows == rows
    assert now[0] < 9 * 5.6
    assert curve(costs) == pytest.approx(runner.whole(36))


def test_slow_plain_steps_are_measured_once_and_at_fewer_sizes(now: list[float]) -> None:
    quick, slow, slower = (Runner(now, seconds, requests=100) for seconds in (0.01, 0.55, 0.9))
    sizes = [measure(runner).requests for runner in (quick, slow, slower)]
    assert len(quick.steps) == 2 * 8 * step_costs.REPETITIONS
    assert {*slow.steps} == {*quick.steps}
    assert 2 * 8 < len(slow.steps) < PLAIN_SECONDS / 0.55 + 2
    assert sizes[0] == sizes[1] == (1, 2, 4, 8, 16, 32, 64, 100)
    assert sizes[2] == (1, 2, 4, 8, 16, 100)


@pytest.mark.parametrize(("slow", "closely"), [(0.05, True), (0.3, False), (2.0, True)])
def test_ranks_measure_the_same_steps_whatever_their_clocks_say(
    slow: float, closely: bool, now: list[float]
) -> None:
    """Control: a rank that uses its own clock measures others."""
    said: list[Any] = []

    def first(numbers: Any) -> Any:
        said.append(numbers)
        return numbers

    runners = [Runner(now, each, slow / 9, requests=100) for each in (slow, 0.0, 0.0)]
    measure(runners[0], first, closely)
    others = iter(said)
    measure(runners[1], lambda _: next(others), closely)
    measure(runners[2], alone, closely)
    ran = [(runner.rows, runner.steps) for runner in runners]
    assert ran[0] == ran[1] != ran[2]


@pytest.mark.parametrize("most", [1, 7, 100, 4096])
def test_few_sizes_span_one_request_to_all(most: int) -> None:
    sizes = step_costs.sizes_up_to(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= step_costs.SIZES


@pytest.mark.parametrize(
    ("times_as_slow", "holds"), [(1.0, True), (1.8, True), (2.5, False), (0.4, False)]
)
def test_kept_costs_hold_while_a_few_steps_take_as_long(
    now: list[float], times_as_slow: float, holds: bool
) -> None:
    costs = measure(Runner(now, forward=0.1))
    later = Runner(now, forward=0.1 * times_as_slow)
    began = now[0]
    assert step_costs.still_hold(later, alone, costs) == holds
    assert now[0] - began < (4 * 0.1 * times_as_slow if holds else 1.5 * step_costs.CHECK_SECONDS)
    assert later.speculator == "drafting"


def test_steps_that_were_disturbed_at_first_are_compared_again(now: list[float]) -> None:
    costs, later = measure(Runner(now)), Runner(now, forward=0.1)
    stock = later._dummy_run

    def dummy_run(*of: Any, **how: Any) -> Any:
        if len(later.steps) + len(later.rows) == 9:
            later._cost = Runner(now)._cost
        return stock(*of, **how)

    later._dummy_run = dummy_run
    assert step_costs.still_hold(later, alone, costs)


def test_slow_steps_are_compared_once(now: list[float]) -> None:
    costs = measure(Runner(now, forward=3.0))
    later = Runner(now, forward=3.0)
    assert step_costs.still_hold(later, alone, costs)
    assert len(later.steps) + len(later.rows) == 3


def test_ranks_agree_on_whether_kept_costs_hold(now: list[float]) -> None:
    """The first rank finds that they do."""
    costs = measure(Runner(now))
    slow = Runner(now, forward=1.0)
    assert not step_costs.still_hold(slow, alone, costs)

    def agree(numbers: Any) -> Any:
        return True if isinstance(numbers, bool) else numbers

    assert step_costs.still_hold(slow, agree, costs)
