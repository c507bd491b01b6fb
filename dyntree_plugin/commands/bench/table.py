"""The texts of a result's tables, and the sentences below them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dyntree_plugin.commands.bench.results import Cell, Result
from dyntree_plugin.commands.bench.summary import (
    Row,
    Spread,
    best_chain,
    best_fixed,
    fallback_shares,
    is_longest,
    of_single_tokens,
    speed_up,
)

NONE = "–"


def has_trees(result: Result, row: Row) -> bool:
    return "tree" in result.engine(row.series.engine).kind


def row_cells(result: Result, row: Row) -> Iterator[tuple[str, bool]]:
    """Yield the text of every column, and whether it is a loss."""
    yield NONE if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}", False
    yield f"{row.step_ms.median:.1f}" if row.step_ms.median else NONE, False
    yield with_spread(row.tpot_ms) if row.tpot_ms.median else NONE, False
    yield f"{row.tokens_per_second.median:.1f}", False
    yield with_spread(row.over_first), loses(row.over_first)
    if row.over_chain is None:
        yield NONE, False
    else:
        # All chains but the best are slower than the best.
        yield with_spread(row.over_chain), has_trees(result, row) and loses(row.over_chain)
    series = row.series
    if series.differing_tokens is None:
        yield NONE, False
    else:
        yield f"{series.differing_tokens} of {series.compared_tokens}", False


def loses(ratio: Spread) -> bool:
    return round(ratio.median, 2) < 1


def with_spread(spread: Spread) -> str:
    """Return the median, and the standard error if the rounds differ."""
    if math.isnan(spread.median):
        return NONE
    if spread.low == spread.high:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ±{spread.error:.2f}"


def remarks(result: Result, cell: Cell) -> Iterator[str]:
    best = best_chain(result, cell)
    if best is not None:
        longest = is_longest(result, best)
        more = ", the longest of its kind: a longer one may be better still" if longest else ""
        yield f"The best chain here is the {best.engine}{more}."
    for name, series in result.of(cell).items():
        if fixed := best_fixed(result, cell, name):
            ratio = with_spread(speed_up(series, fixed))
            yield f"{name}: {ratio} × the best fixed budget, {fixed.engine}."
        if of_single_tokens(series):
            yield f"{name}: answers of one token show no time per token."
        if shares := fallback_shares(series):
            reasons = ", ".join(f"{reason} {share:.1%}" for reason, share in shares.items())
            yield (
                f"{name}: chains or no tree in {sum(shares.values()):.1%} of its requests' steps "
                f"({reasons})."
            )
