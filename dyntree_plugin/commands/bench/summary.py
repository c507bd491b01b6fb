"""What follows from a result: medians over the rounds, and ratios within each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from dyntree_plugin.commands.bench.results import Cell, Result, Run, Series


@dataclass(frozen=True)
class Spread:
    """The median over the rounds, and the smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """An engine on a cell.

    ``over_first`` and ``over_chain``: how many times faster a token comes than from the first
    engine, which is that without speculation unless servers are compared, and than from the best
    chain of that cell; None without a chain.
    """

    series: Series
    tokens_per_step: float | None
    step_ms: Spread
    tpot_ms: Spread
    tokens_per_second: Spread
    over_first: Spread
    over_chain: Spread | None


def rows(result: Result, cell: Cell) -> list[Row]:
    found = result.of(cell)
    kinds = {engine.name: engine.kind for engine in result.engines}
    first = next(iter(found.values()))
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
        for name, series in found.items()
    ]


def best_chain(result: Result, cell: Cell) -> Series | None:
    """The chain whose tokens come fastest."""
    chains = [s for name, s in result.of(cell).items() if result.engine(name).kind == "chain"]
    return min(chains, key=lambda s: median(run.tpot_ms for run in s.runs), default=None)


def speed_up(series: Series, reference: Series) -> Spread:
    """Of each round by itself, so that drift between the rounds cancels."""
    times = {run.round: run.tpot_ms for run in reference.runs}
    return Spread.of([times[run.round] / run.tpot_ms for run in series.runs])


def tokens_per_step(series: Series, plain: bool = False) -> float | None:
    """Tokens that a request gets from one verified chain or tree; None where none is known."""
    drafts = sum(run.speculation.drafts for run in series.runs)
    if drafts:
        return 1 + sum(run.speculation.accepted_tokens for run in series.runs) / drafts
    return 1.0 if plain else None


def longest_chain_is_best(result: Result, cell: Cell) -> bool:
    """Whether a chain that was not measured may be better than those that were."""
    best = best_chain(result, cell)
    budgets = [engine.budget for engine in result.engines if engine.kind == "chain"]
    return best is not None and result.engine(best.engine).budget == max(budgets)


def _spread(series: Series, value: Callable[[Run], float]) -> Spread:
    return Spread.of([value(run) for run in series.runs])
