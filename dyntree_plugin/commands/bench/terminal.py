"""Show a result as tables in the terminal. They fit 80 columns without breaking a word."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dyntree_plugin.commands.bench.results import Cell, Result
from dyntree_plugin.commands.bench.summary import Row, Spread, rows
from dyntree_plugin.commands.bench.table import (
    NONE,
    has_trees,
    loses,
    remarks,
    with_spread,
)

_UNLIMITED = 10_000
"""More characters than a line has."""

_FIXED_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class _Layout:
    """A layout; ``name`` is the most characters in a line of an engine's name."""

    name: int
    ranges: bool = True
    steps: bool = True


_LAYOUTS = (
    _Layout(_UNLIMITED), _Layout(26), _Layout(26, ranges=False),
    _Layout(26, ranges=False, steps=False),
)  # fmt: skip
"""From the widest to the narrowest."""


def show(console: Console, result: Result) -> None:
    """Show every cell. Losses against the first engine, or of a tree against a chain, are red."""
    cells = list(result.cells())
    layout = _fitting(console, result, cells)
    for cell in cells:
        console.print(_table(result, cell, layout))
        for line in (*remarks(result, cell), *_other_tokens(result, cell)):
            console.print(Text(line, style="yellow"))
        console.print()
    console.print(Text(_legend(result), style="dim"))
    for note in result.notes:
        console.print(Text(note, style="dim"))


def _fitting(console: Console, result: Result, cells: list[Cell]) -> _Layout:
    """Return the widest layout in which the tables of all cells fit."""
    unlimited = console.options.update(max_width=_UNLIMITED)

    def width(layout: _Layout) -> int:
        tables = (_table(result, cell, layout) for cell in cells)
        return max(Measurement.get(console, unlimited, each).maximum for each in tables)

    return next((each for each in _LAYOUTS if width(each) <= console.width), _LAYOUTS[-1])


def _table(result: Result, cell: Cell, layout: _Layout) -> Table:
    table = Table(
        title=cell.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        show_edge=False, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    table.add_column()
    shown = rows(result, cell)
    columns: list[list[Text]] = []
    for heading, value in _columns(result, layout):
        texts = [value(row) for row in shown]
        if any(text.plain != NONE for text in texts):
            table.add_column(heading, justify="right", no_wrap=True)
            columns.append(texts)
    for row, *values in zip(shown, *columns, strict=True):
        name = _name(row.series.engine, layout.name)
        table.add_row(name, *values, style="bold" if has_trees(result, row) else None)
    return table


def _columns(result: Result, layout: _Layout) -> Iterator[tuple[str, Callable[[Row], Text]]]:
    """Yield the heading of every column, and a function for its value in a row."""

    def ratio(spread: Spread | None, counts: bool) -> Text:
        if spread is None:
            return Text(NONE)
        middle = Spread.of([spread.median])
        text = with_spread(spread if layout.ranges else middle)
        return Text(text, style="red" if counts and loses(spread) else "")

    if layout.steps:
        yield "tokens\n/step", lambda row: _number(row.tokens_per_step, 2)
        yield "ms\n/step", lambda row: _number(row.step_ms.median, 1)
    yield "ms\n/token", lambda row: _number(row.tpot_ms.median, 2)
    if layout.steps:
        yield "tokens\n/s", lambda row: _number(row.tokens_per_second.median, 1)
    yield "speed-up", lambda row: ratio(row.over_first, True)
    # All chains but the best are slower than the best.
    yield "× best\nchain", lambda row: ratio(row.over_chain, has_trees(result, row))


def _number(value: float | None, digits: int) -> Text:
    return Text(f"{value:.{digits}f}" if value else NONE)


def _name(name: str, most: int) -> str:
    """Return a name in lines that end after its commas."""
    parts = name.replace(" ", _FIXED_SPACE).replace(f",{_FIXED_SPACE}", ", ")
    lines = textwrap.wrap(parts, most, subsequent_indent=2 * _FIXED_SPACE, break_long_words=False)
    return "\n".join(lines).replace(_FIXED_SPACE, " ")


def _other_tokens(result: Result, cell: Cell) -> Iterator[str]:
    """Yield a line that says by how much the answers differ from the first engine's."""
    first = result.engines[0].name
    series_of = result.of(cell)
    if any(series.differing_requests is None for series in series_of.values()):
        return
    differing = []
    for name, series in series_of.items():
        if series.differing_requests and series.differing_tokens is None:
            differing.append(f"{name} in {series.differing_requests} texts")
        elif series.differing_tokens:
            differing.append(f"{name} in {series.differing_tokens} of {series.compared_tokens}")
    if differing:
        yield f"Other tokens than those of {first}: {', '.join(differing)}."
    elif len(series_of) > 1:
        yield f"All answers are those of {first}."


def _legend(result: Result) -> str:
    first = result.engines[0].name
    return (
        f"tokens/step: of one request; speed-up: over {first}; × best chain: over the best chain "
        "of the table. Both compare times per token. ±: half of the range over the rounds. Red: "
        "slower."
    )
