"""Measuring the cost of plain steps, on a fake runner whose steps take a known time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_cpu_runner import install

install()  # must run before the runner's modules are imported

from dyntree_plugin.engine.budget import plain_cost, timed_steps  # noqa: E402
from dyntree_plugin.engine.step.clock import Measured  # noqa: E402

NODES = 4


def alone(seconds: float) -> float:
    return seconds


class Runner:
    """A fake runner: steps take 1 ms, and 1 µs for each token that they read.

    Each step takes ``slow`` more seconds, and the host waits for as long.
    """

    max_num_reqs, max_num_tokens, max_model_len = 100, 512, 2048

    def __init__(self, clock: Clock, slow: float, ranks: int = 1) -> None:
        self.parallel_config = SimpleNamespace(world_size_across_dp=ranks)
        self.clock = clock
        self.speculator: Any = "drafting"
        self.trees = SimpleNamespace(shape=SimpleNamespace(node_budget=NODES))
        self.forwards: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self._slow, self.of_row = slow, 0.0
        self.greedy = 0

    def queue_delay(self) -> None:
        assert self.speculator is None, "plain steps must not draft"

    def _dummy_run(self, rows: int, context_len: int | None = None) -> tuple[str, str]:
        if context_len is None:
            self.forwards.append(rows)
        else:
            self.steps.append((rows, context_len))
        of_tokens = rows * (1 + (context_len or 0)) * 1e-6
        self.clock.spent["target"] = 1e-3 + of_tokens + self._slow + rows * self.of_row
        self.clock.now += self._slow
        return "hidden", "hidden"


@pytest.fixture(autouse=True)
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sampling take a millisecond, and check that it is greedy."""

    def sample_greedily(runner: Runner, requests: int) -> None:
        runner.greedy = requests

    def sample_plain(runner: Runner, hidden: str) -> None:
        assert runner.greedy >= runner.steps[-1][0], (
            "vLLM's dummy runs enable every sampling option"
        )
        runner.clock.spent["sample"] = 1e-3

    monkeypatch.setattr(plain_cost, "sample_greedily", sample_greedily)
    monkeypatch.setattr(plain_cost, "sample_plain", sample_plain)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.spent: dict[str, float] = {}

    def monotonic(self) -> float:
        return self.now

    def __call__(self, stage: str) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def split(self) -> Measured:
        taken, self.spent = self.spent, {}
        return Measured(taken)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(plain_cost, "time", clock)
    return clock


def test_steps_with_and_without_context_are_measured_and_drafting_comes_back(clock: Clock) -> None:
    runner: Any = Runner(clock, 0.0)
    cost = plain_cost.measure(runner, alone)
    assert cost.requests == (1, 2, 4, 8, 16, 32, 64, 100)
    assert cost.seconds(8, 0) == pytest.approx(2e-3 + 8e-6)
    assert cost.seconds(8, 512) == pytest.approx(2e-3 + 8 * 513e-6)
    assert runner.speculator == "drafting"


def test_forwards_over_the_rows_of_trees_are_measured_without_sampling(clock: Clock) -> None:
    runner: Any = Runner(clock, 0.0)
    cost = plain_cost.measure(runner, alone)
    assert cost.rows == tuple(sorted({*runner.forwards}))
    assert (cost.rows[0], cost.rows[-1]) == (1, Runner.max_num_reqs * (NODES + 1))
    assert cost.forwards == pytest.approx([1e-3 + rows * 1e-6 for rows in cost.rows])


def test_no_forward_has_more_rows_of_a_request_than_its_context_holds(clock: Clock) -> None:
    """The KV cache has no room for more rows, whatever a tree's budget is."""
    runner: Any = Runner(clock, 0.0)
    runner.max_model_len = NODES
    cost = plain_cost.measure(runner, alone)
    assert max(runner.forwards) == cost.rows[-1] == Runner.max_num_reqs * NODES
    assert timed_steps.most_rows(runner) == Runner.max_num_reqs * NODES


def test_slow_forwards_are_measured_over_few_rows(clock: Clock) -> None:
    runner: Any = Runner(clock, plain_cost.FORWARD_SECONDS / 13)
    cost = plain_cost.measure(runner, alone)
    assert cost.rows == (1, 4, 16)
    assert {*runner.forwards} == {1, 4, 16}


def test_offloaded_weights_are_measured_in_a_few_steps(clock: Clock) -> None:
    """At 5.6 s per step, which a 70B target takes over PCIe 4."""
    runner: Any = Runner(clock, 5.6)
    cost = plain_cost.measure(runner, alone)
    assert clock.now < 9 * 5.6
    assert cost.requests == (1, 100)
    assert cost.rows == (1, 1 + NODES, 100 * (1 + NODES))
    assert cost.seconds(1, 0) == pytest.approx(5.6, abs=0.01)
    assert cost.forwards == pytest.approx([5.6] * 3, abs=0.01)


def test_a_slow_forward_whose_rows_cost_much_is_not_made_over_the_most_rows(clock: Clock) -> None:
    runner: Any = Runner(clock, 5.6)
    runner.of_row = 0.5
    cost = plain_cost.measure(runner, alone)
    assert cost.rows == (1, 1 + NODES)


def test_several_ranks_run_the_same_forwards_as_the_first_tells_them(clock: Clock) -> None:
    """Control: a rank that uses its own clock runs other forwards."""
    told: list[float] = []

    def first(seconds: float) -> float:
        told.append(seconds)
        return seconds

    ranks: list[Any] = [Runner(clock, slow, ranks=2) for slow in (1.0, 0.0, 0.0)]
    plain_cost.measure(ranks[0], first)
    answers = iter(told)
    plain_cost.measure(ranks[1], lambda _: next(answers))
    plain_cost.measure(ranks[2], alone)
    assert ranks[0].forwards == ranks[1].forwards != ranks[2].forwards


def test_slow_steps_are_measured_once_when_time_is_up(clock: Clock) -> None:
    quick: Any = Runner(clock, 0.0)
    plain_cost.measure(quick, alone)
    slow: Any = Runner(clock, 0.8 * timed_steps.SLOW_STEP)
    plain_cost.measure(slow, alone)
    assert len(quick.steps) == 1 + 2 * 8 * plain_cost.REPETITIONS
    assert {*slow.steps} == {*quick.steps}
    assert 1 + 2 * 8 < len(slow.steps) < 1 + 2 * 8 + plain_cost.SECONDS / 0.8


@pytest.mark.parametrize("slow", [0.8 * timed_steps.SLOW_STEP, 2 * timed_steps.SLOW_STEP])
def test_several_ranks_run_the_same_steps_whatever_their_clocks_say(
    slow: float, clock: Clock
) -> None:
    told: list[float] = []

    def first(seconds: float) -> float:
        told.append(seconds)
        return seconds

    ranks: list[Any] = [Runner(clock, seconds, ranks=2) for seconds in (slow, 0.0)]
    plain_cost.measure(ranks[0], first)
    answers = iter(told)
    plain_cost.measure(ranks[1], lambda _: next(answers))
    assert ranks[0].steps == ranks[1].steps
    assert ranks[0].forwards == ranks[1].forwards


@pytest.mark.parametrize("most", [1, 2, 7, 8, 100, 128, 256, 1000, 4096])
def test_few_sizes_span_one_request_to_all(most: int) -> None:
    sizes = plain_cost.sizes_up_to(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= plain_cost.SIZES
