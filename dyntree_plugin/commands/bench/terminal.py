"""Show a result as tables in the terminal. They fit 80 columns without breaking a word."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dyntree_plugin.commands.bench.results import Cell, Result
from dyntree_plugin.commands.bench.summary import rows
from dyntree_plugin.commands.bench.table import NONE, has_trees, remarks, row_cells

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


_OF_STEPS = ("tokens\n/step", "ms\n/step", "tokens\n/s")
_HEADINGS = (*_OF_STEPS[:2], "ms\n/token", _OF_STEPS[2], "speed-up", "× best\nchain")
"""Of the columns of `row_cells`, but the last."""


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


def of_engines(title: str) -> Table:
    """Return a table whose first column is for the names of engines."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        show_edge=False, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    table.add_column()
    return table


def _table(result: Result, cell: Cell, layout: _Layout) -> Table:
    table = of_engines(cell.title)
    shown = rows(result, cell)
    columns: list[list[Text]] = []
    by_column = zip(*(row_cells(result, row) for row in shown), strict=True)
    for heading, found in zip(_HEADINGS, by_column, strict=False):
        texts = [text if layout.ranges else text.partition(" ±")[0] for text, _ in found]
        if set(texts) != {NONE} and (layout.steps or heading not in _OF_STEPS):
            table.add_column(heading, justify="right", no_wrap=True)
            marked = zip(texts, found, strict=True)
            columns.append([Text(text, "red" if lost else "") for text, (_, lost) in marked])
    for row, *values in zip(shown, *columns, strict=True):
        name = _name(row.series.engine, layout.name)
        table.add_row(name, *values, style="bold" if has_trees(result, row) else None)
    return table


def _name(name: str, most: int) -> str:
    """Return a name in lines that end after its commas."""
    parts = name.replace(" ", _FIXED_SPACE).replace(f",{_FIXED_SPACE}", ", ")
    lines = textwrap.wrap(parts, most, subsequent_indent=2 * _FIXED_SPACE, break_long_words=False)
    return "\n".join(lines).replace(_FIXED_SPACE, " ")


def _other_tokens(result: Result, cell: Cell) -> Iterator[str]:
    """Yield a line that says by how much the answers differ from the first engine's."""
    first = result.engines[0].name
    series_of = result.of(cell)
    if any(series.differing_tokens is None for series in series_of.values()):
        return
    differing = [
        f"{name} in {series.differing_tokens} of {series.compared_tokens}"
        for name, series in series_of.items()
        if series.differing_tokens
    ]
    if differing:
        yield f"Other tokens than those of {first}: {', '.join(differing)}."
    elif len(series_of) > 1:
        yield f"All answers are those of {first}."


def _legend(result: Result) -> str:
    first = result.engines[0].name
    return (
        f"tokens/step: of one request; speed-up: over {first}; × best chain: over the best chain "
        "of the table. Both compare times per token, in steps that read no prompt. ±: standard "
        "error over the rounds. Red: slower."
    )
