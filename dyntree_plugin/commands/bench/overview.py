"""Show a result in a few lines: the speed-up of every engine in every cell.

As a program it shows a result file.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from rich.console import Console

from dyntree_plugin.commands.bench.results import Result, read
from dyntree_plugin.commands.bench.summary import rows
from dyntree_plugin.commands.bench.table import NONE
from dyntree_plugin.commands.bench.terminal import of_engines


def show(console: Console, result: Result) -> None:
    """Show a table of the median speed-ups over the first engine; the best of a cell is bold."""
    cells = list(result.cells())
    table = of_engines(f"Speed-up over {result.engines[0].name} (T: temperature, B: batch)")
    several = len({cell.prompts for cell in cells}) > 1
    for cell in cells:
        words = [*(cell.prompts.split() if several else ()), f"T {cell.temperature:g}"]
        table.add_column("\n".join([*words, f"B {cell.batch}"]), justify="right", no_wrap=True)
    ratios = {
        cell: {
            row.series.engine: row.over_first.median
            for row in rows(result, cell)
            if not math.isnan(row.over_first.median)
        }
        for cell in cells
    }
    for engine in result.engines:
        table.add_row(engine.name, *(_ratio(ratios[cell], engine.name) for cell in cells))
    console.print(table)


def _ratio(ratios: dict[str, float], engine: str) -> str:
    if engine not in ratios:
        return NONE
    text = f"{ratios[engine]:.2f}"
    return f"[bold]{text}[/]" if ratios[engine] == max(ratios.values()) else text


if __name__ == "__main__":
    show(Console(highlight=False, width=120), read(Path(sys.argv[1])))
