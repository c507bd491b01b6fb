"""Show the percentiles of servers' times in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.console import Console
from rich.table import Table

from dyntree_plugin.commands.bench.results import Cell, Result
from dyntree_plugin.commands.bench.table import NONE

TIMES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms"}


def show(console: Console, result: Result) -> None:
    """Show the medians over the rounds of every cell; nothing if no run has percentiles."""
    cells = {cell: list(_rows(result, cell)) for cell in result.cells()}
    if not any(cells.values()):
        return
    for cell, rows in cells.items():
        table = Table(title=f"{cell.title}, in ms", title_justify="left", title_style="bold")
        table.add_column()
        columns = list(dict.fromkeys(column for _, values in rows for column in values))
        for time, percent in columns:
            table.add_column(f"{time}\np{percent:g}", justify="right", no_wrap=True)
        for engine, values in rows:
            table.add_row(
                engine, *(f"{values[column]:.1f}" if values[column] else NONE for column in columns)
            )
        console.print(table)
    console.print(
        "Percentiles. TTFT: time to the first token. TPOT: time per later token of a request. "
        "ITL: time between two pieces of a stream; a piece may have several tokens.",
        style="dim",
    )


def _rows(result: Result, cell: Cell) -> Iterator[tuple[str, dict[tuple[str, float], float]]]:
    """Yield each server with its percentiles by time and percent."""
    for engine, series in result.of(cell).items():
        columns: dict[tuple[str, float], list[float]] = {}
        for name, field in TIMES.items():
            for run in series.runs:
                for one in run.percentiles:
                    columns.setdefault((name, one.percent), []).append(getattr(one, field))
        if columns:
            yield engine, {column: median(values) for column, values in columns.items()}
