"""Draw a result of `dyntree bench serve`: python -m benchmarks.serve.plots RESULT FOLDER"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.serve import speed_up
from dyntree_plugin.commands.bench.results import Cell, Result, read
from dyntree_plugin.commands.bench.summary import Row, best_chain, best_tree, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = ("target", "draft", "catch_up", "verify", "sample", "place")
"""Stages of a bar from left to right. Others that a result has come after them."""
_OTHER = "the rest"
_MOST_TREES = 2
_LEAST_SHARE = 0.06
"""Share of the longest bar that a stage needs for its number to be written into it."""


def draw(result: Result, folder: Path) -> list[Path]:
    """Write every picture that this result has data for; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in _figures(result):
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=150, bbox_inches="tight")
    return written


def _figures(result: Result) -> Iterator[tuple[str, Figure]]:
    if any(engine.kind == "plain" for engine in result.engines):
        yield "speed_up", speed_up.figure(result)
    if any(run.stages_ms for series in result.series for run in series.runs):
        yield "time_per_stage", time_per_stage(result)


def time_per_stage(result: Result) -> Figure:
    """Draw a step's milliseconds by stage, at the smallest and the largest batch.

    The bars are no speculation, the best chain, and the best trees.
    """
    batches = [cell.batch for cell in result.cells()]
    shown = [cell for cell in result.cells() if cell.batch in (min(batches), max(batches))]
    columns = len({cell.batch for cell in shown})
    stages = [*dict.fromkeys([*STAGES, *_stages(result)]), _OTHER]
    figure, axes = _axes(-(-len(shown) // columns), columns, 6.5, 2.6)
    for axis, cell in zip(axes, shown, strict=False):
        _draw_stages(axis, chosen(result, cell), stages)
        axis.set_title(cell.title, fontsize=13)
    for axis in axes[-columns:]:
        axis.set_xlabel("ms per step, and tokens of each request", fontsize=12)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=12, ncols=len(labels), loc="outside upper center", frameon=False
    )
    return figure


def _draw_stages(axis: Any, bars: list[Row], stages: list[str]) -> None:
    from matplotlib import colormaps

    names = [row.series.engine.replace(", ", ",\n") for row in bars]
    longest = max(row_ms(row) for row in bars)
    reached = [0.0] * len(bars)
    for number, stage in enumerate(stages):
        widths = [stage_ms(row, stage) for row in bars]
        shade: Any = "0.6" if stage == _OTHER else colormaps["tab10"](number % 10)
        if any(widths):
            drawn = axis.barh(names, widths, left=reached, label=stage, color=shade, height=0.8)
            texts = [f"{ms:.0f}" if ms > _LEAST_SHARE * longest else "" for ms in widths]
            axis.bar_label(
                drawn, texts, label_type="center", fontsize=12, color="white", fontweight="bold"
            )
        reached = [sum(ends) for ends in zip(reached, widths, strict=True)]
    for place, (end, row) in enumerate(zip(reached, bars, strict=True)):
        tokens = "" if row.tokens_per_step is None else f" for {row.tokens_per_step:.1f} tokens"
        axis.text(end, place, f" {end:.0f} ms{tokens}", va="center", fontsize=12)
    axis.set_xlim(right=1.5 * longest)
    axis.tick_params(labelsize=12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.invert_yaxis()


def chosen(result: Result, cell: Cell) -> list[Row]:
    """Return the rows of no speculation, of the best chain, and of the best trees."""
    found = rows(result, cell)
    first, chain, tree = found[0], best_chain(result, cell), best_tree(result, cell)
    trees = [row for row in found if "tree" in result.engine(row.series.engine).kind]
    trees = sorted(trees, key=lambda row: row.tpot_ms.median)[:_MOST_TREES]
    names = {row.series.engine for row in (first, *trees)}
    names |= {series.engine for series in (chain, tree) if series is not None}
    return [row for row in found if row.series.engine in names]


def row_ms(row: Row) -> float:
    return fmean(run.step_ms for run in row.series.runs)


def stage_ms(row: Row, stage: str) -> float:
    """Return the mean milliseconds of a stage in a step."""
    runs = row.series.runs
    if stage == _OTHER:
        return row_ms(row) - sum(sum(run.stages_ms.values()) for run in runs) / len(runs)
    return sum(run.stages_ms.get(stage, 0.0) for run in runs) / len(runs)


def _stages(result: Result) -> Iterator[str]:
    for series in result.series:
        for run in series.runs:
            yield from run.stages_ms


def _axes(down: int, across: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * across, height * down + 0.5), layout="constrained")
    return figure, list(figure.subplots(down, across, squeeze=False).flat)


if __name__ == "__main__":
    for picture in draw(read(Path(sys.argv[1])), Path(sys.argv[2])):
        print(picture)  # noqa: T201
