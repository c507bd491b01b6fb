"""The estimate of plain steps, on simulated engines of known speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_plugin.tree.budget.plain_steps import FIRST_STEPS, PlainSteps, StepCosts

REQUESTS, ROWS, CONTEXT = (1, 2, 4, 8), (1, 4, 16, 64, 136), 1000
WITHOUT, FULL = (0.010, 0.012, 0.016), (0.020, 0.032, 0.056)
COST = StepCosts((1, 2, 4), 1000, WITHOUT, FULL, (1,), (0.01,), (0.01,), 1)


def test_a_plain_step_between_two_that_were_measured_costs_what_lies_between() -> None:
    assert COST.seconds(1, 0) == 0.010
    assert COST.seconds(3, 0) == pytest.approx(0.014)
    assert COST.seconds(9, 0) == 0.016
    assert COST.seconds(3, 1000) == pytest.approx(0.044)
    assert COST.seconds(2, 2000) == pytest.approx(0.052)


@dataclass
class Engine:
    """A simulated engine.

    A forward takes 10 ms, 0.1 ms for each row and 1 µs for each token of context. Sampling takes 1
    ms. ``slower`` is a factor on both.
    """

    slower: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)

    def forward(self, rows: int, requests: int, context: float) -> float:
        seconds = 0.01 + 1e-4 * rows + 1e-6 * requests * context
        return self.slower * seconds * float(np.exp(self.noise * self._random.standard_normal()))

    def plain(self, requests: int, context: float) -> float:
        return self.forward(requests, requests, context) + 1e-3 * self.slower

    def measured(self) -> StepCosts:
        without, full = (tuple(self.plain(n, c) for n in REQUESTS) for c in (0, CONTEXT))
        forwards = tuple(self.forward(rows, 0, 0) for rows in ROWS)
        return StepCosts(REQUESTS, CONTEXT, without, full, ROWS, forwards, forwards, ROWS[-1])

    def serve(
        self, steps: PlainSteps, count: int, requests: int = 1, rows: int = 17
    ) -> list[float | None]:
        """Run ``count`` steps with contexts of 500 tokens, and return the estimates.

        They are given as multiples of a plain step's true time.
        """
        quiet = replace(self, noise=0.0).plain(requests, 500)
        found = []
        for _ in range(count):
            forward = self.forward(rows, requests, 500)
            seconds = steps.seconds(requests, 500, rows, forward, 2e-3 * self.slower)
            found.append(None if seconds is None else seconds / quiet)
        return found


def said(found: list[float | None]) -> list[float]:
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    ("slower", "requests", "rows", "noise"), [(0.5, 1, 17, 0.2), (2.0, 8, 136, 0.0)]
)
def test_a_machine_whose_speed_changes_after_start_up_is_followed(
    slower: float, requests: int, rows: int, noise: float
) -> None:
    """No step is plain. Control: the initial measurement is wrong by the change."""
    engine = Engine()
    measured = engine.measured()
    steps = PlainSteps(measured)
    engine.serve(steps, 100, requests, rows)
    changed = Engine(slower, noise)
    changed.serve(steps, 60, requests, rows)
    after = said(changed.serve(steps, 100, requests, rows))
    assert len(after) > 50
    assert after == pytest.approx([1.0] * len(after), rel=0.2)
    assert measured.seconds(requests, 500) / changed.plain(requests, 500) != pytest.approx(1, 0.3)


def test_plain_steps_put_right_what_steps_with_trees_tell_of_them() -> None:
    """Only forwards over many rows have become twice as slow, as on shared cores."""
    engine, busy = Engine(), Engine(slower=2.0)
    alone, mixed = (PlainSteps(engine.measured()) for _ in range(2))
    for _ in range(200):
        busy.serve(alone, 1, rows=64)
        busy.serve(mixed, 1, rows=64)
        engine.serve(mixed, 1, rows=1)
    forward = 2 * engine.forward(64, 1, 500)
    assert (alone.seconds(1, 500, 64, forward, 1.0) or 0) > 1.5 * engine.plain(1, 500)
    assert mixed.seconds(1, 500, 64, forward, 1.0) == pytest.approx(engine.plain(1, 500), rel=0.1)


def test_noise_and_interrupted_steps_silence_nothing_for_long() -> None:
    engine = Engine(noise=0.3)
    steps = PlainSteps(replace(engine, noise=0.0).measured())
    found = []
    for _ in range(40):
        found += engine.serve(steps, 19)
        found += Engine(slower=50.0).serve(steps, 1)
    assert len(said(found)) > 0.8 * len(found)


SECONDS = st.floats(1e-3, 10)


@settings(deadline=None)
@given(
    *(st.lists(SECONDS, min_size=n, max_size=n).map(tuple) for n in (4, 4, 5)),
    st.lists(
        st.tuples(st.sampled_from(REQUESTS), st.integers(1, 16), SECONDS, SECONDS),
        min_size=FIRST_STEPS,
        max_size=2 * FIRST_STEPS,
    ),
    st.booleans(),
)
def test_a_step_is_never_said_to_save_more_than_its_target_took(
    without: tuple[float, ...],
    full: tuple[float, ...],
    forwards: tuple[float, ...],
    served: list[tuple[int, int, float, float]],
    alike: bool,
) -> None:
    steps = PlainSteps(
        StepCosts(REQUESTS, CONTEXT, without, full, ROWS, forwards, forwards, ROWS[-1])
    )
    for requests, nodes, forward, sampling in served[:1] * 400 if alike else served:
        rows = requests * (1 + nodes)
        found = steps.seconds(requests, 500.0, rows, forward, sampling)
        assert found is None or 0 < found <= forward + sampling
    assert not alike or found is not None
