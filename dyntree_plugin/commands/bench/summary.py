"""Compute medians over the rounds, and ratios within each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import nan, sqrt
from statistics import median, stdev
from typing import Any

from dyntree_plugin.commands.bench.chains import kind_of
from dyntree_plugin.commands.bench.results import Cell, Result, Series
from dyntree_plugin.commands.loads.runs import Run
from dyntree_plugin.options.options import NAMESPACE


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest value over the rounds, and the standard error of their mean.

    ``error`` is 0 for a single round.
    """

    median: float
    low: float
    high: float
    error: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of these values; NaN of none."""
        if not values:
            return cls(nan, nan, nan, nan)
        error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(median(values), min(values), max(values), error)


@dataclass(frozen=True)
class Row:
    """One engine's figures on one cell.

    ``over_first``: speed-up over the first engine, which has no speculation. ``over_chain``: that
    over the best chain of the cell; None without one. Both are NaN if answers have one token.
    """

    series: Series
    tokens_per_step: float | None
    step_ms: Spread
    tpot_ms: Spread
    tokens_per_second: Spread
    over_first: Spread
    over_chain: Spread | None


def rows(result: Result, cell: Cell) -> list[Row]:
    by_engine = result.of(cell)
    kinds = {engine.name: engine.kind for engine in result.engines}
    first = next(iter(by_engine.values()))
    chain = best_chain(result, cell)
    return [
        Row(
            series,
            tokens_per_step(series, kinds[name] == "plain"),
            _spread(series, lambda run: run.step_ms),
            _spread(series, lambda run: run.tpot_ms),
            _spread(series, lambda run: run.output_tokens / run.seconds),
            speed_up(series, first),
            None if chain is None else speed_up(series, chain),
        )
        for name, series in by_engine.items()
    ]


def best_chain(result: Result, cell: Cell) -> Series | None:
    """Return the chain with the least time per token."""
    return _fastest(s for name, s in result.of(cell).items() if result.engine(name).kind == "chain")


def best_tree(result: Result, cell: Cell) -> Series | None:
    """Return the tree with the least time per token."""
    return _fastest(s for name, s in result.of(cell).items() if "tree" in result.engine(name).kind)


def best_fixed(result: Result, cell: Cell, engine: str) -> Series | None:
    """Return the fastest tree with a fixed budget and the same promise as adaptive ``engine``.

    None if its own budget is fixed, or there is none.
    """
    asked = _asked(result, engine)
    if asked is None or asked.get("budget") == "fixed":
        return None

    def fits(other: Mapping[str, Any] | None) -> bool:
        return (
            other is not None
            and other.get("budget") == "fixed"
            and other.get("exactness") == asked.get("exactness")
        )

    return _fastest(s for name, s in result.of(cell).items() if fits(_asked(result, name)))


def _asked(result: Result, engine: str) -> Mapping[str, Any] | None:
    """Return the options of a tree that grows anew in each step; None for other engines."""
    found = result.engine(engine)
    if found.kind != "dynamic tree":
        return None
    options: Mapping[str, Any] = found.arguments.get("additional_config", {}).get(NAMESPACE, {})
    return options


def _fastest(series: Iterable[Series]) -> Series | None:
    return min(series, key=lambda s: median(run.tpot_ms for run in s.runs), default=None)


def speed_up(series: Series, reference: Series) -> Spread:
    """Compute the speed-up within each round, so that drift between the rounds cancels.

    It is NaN if the answers of one of the two have one token, or they share no round.
    """
    if of_single_tokens(series) or of_single_tokens(reference):
        return Spread.of([])
    times = {run.round: run.tpot_ms for run in reference.runs}
    shared = [run for run in series.runs if run.round in times]
    return Spread.of([times[run.round] / run.tpot_ms for run in shared])


def of_single_tokens(series: Series) -> bool:
    """Return whether all answers of a run have one token, which shows no time per token."""
    return not all(run.tpot_ms for run in series.runs)


def tokens_per_step(series: Series, plain: bool = False) -> float | None:
    """Return the tokens per step of a request after its first token, or None if it is unknown.

    If a file of an earlier version does not count such steps, return the tokens per verified chain
    or tree, including accepted tokens after the end of an answer.
    """
    steps = sum(run.request_steps for run in series.runs)
    if steps:
        return sum(run.output_tokens - run.requests for run in series.runs) / steps
    drafts = sum(run.speculation.drafts for run in series.runs)
    if drafts:
        return 1 + sum(run.speculation.accepted_tokens for run in series.runs) / drafts
    return 1.0 if plain else None


def fallback_shares(series: Series) -> dict[str, float]:
    """Return the share of a request's steps with a chain or no tree by reason, largest first."""
    steps = max(1, sum(run.fallbacks.request_steps for run in series.runs))
    counts: dict[str, int] = {}
    for run in series.runs:
        for reason, count in run.fallbacks.by_reason.items():
            counts[reason] = counts.get(reason, 0) + count
    ordered = sorted(counts.items(), key=lambda each: -each[1])
    return {reason: count / steps for reason, count in ordered}


def is_longest(result: Result, chain: Series) -> bool:
    """Return whether a longer chain of its kind than the measured ones may be better."""
    measured = result.engine(chain.engine)
    of_kind = [e for e in result.engines if e.kind == "chain" and kind_of(e) == kind_of(measured)]
    return measured.budget == max(engine.budget for engine in of_kind)


def _spread(series: Series, value: Callable[[Run], float]) -> Spread:
    return Spread.of([value(run) for run in series.runs])
