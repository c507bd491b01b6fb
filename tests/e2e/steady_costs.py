"""What steps cost: the same on every machine, for tests of what an adaptive budget chooses; and
measured once, where the budget is fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

STEADY_COSTS = "steady_costs"
"""The argument of an engine of `engine_process` or `fuzz_engine` that asks for them, with true."""
ROWS, SECONDS = (1, 272), (4e-3, 29e-3)
"""Rows, and seconds of their verification, about as on one thread with the embedded pair."""


@contextmanager
def assumed_if(asked: bool) -> Iterator[None]:
    """Let engines with a budget by tree assume these costs, whatever their steps take, if asked.

    Where rows or forwards cost much more, hardly any tree pays, and counters stay at 0.
    """
    if not asked:
        yield
        return

    from dyntree_plugin.engine import runner
    from dyntree_plugin.tree.budget.row_cost import RowCost

    def assume(_rows: Any, _seconds: Any, most: int, *_: Any) -> RowCost:
        return RowCost(ROWS, SECONDS, most)

    with (
        mock.patch.object(runner, "RowCost", assume),
        mock.patch.object(RowCost, "observe", return_value=1.0),
    ):
        yield


def measure_once_if_fixed(arguments: Mapping[str, Any]) -> None:
    """Let an engine with these arguments of ``LLM`` run each step once to measure it, if its budget
    is fixed: then nothing but a metric reads the costs."""
    from dyntree_plugin.engine.start import step_costs

    options = arguments.get("additional_config", {}).get("dyntree", {})
    repetitions = _repetitions()
    step_costs.REPETITIONS = 1 if options.get("budget") == "fixed" else repetitions


@cache
def _repetitions() -> int:
    from dyntree_plugin.engine.start.step_costs import REPETITIONS

    return REPETITIONS
