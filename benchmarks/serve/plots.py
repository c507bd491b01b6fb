"""Draw the speed-up of every engine: a dot for each, chains in a band for each kind.

python -m benchmarks.serve.plots RESULT PICTURE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyntree_plugin.commands.bench.chains import KINDS, kind_of
from dyntree_plugin.commands.bench.results import Cell, Result, read
from dyntree_plugin.commands.bench.summary import Row, best_chain, best_tree, rows
from dyntree_plugin.commands.loads.runs import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "plain": "#555555", "static tree": "#E69F00", "dynamic tree": "#009E73",
    "greedy": "#084D96", "probabilistic": "#2E95D3", "block": "#8C6BB1", "n-gram": "#D55E00",
}  # fmt: skip
"""Of kinds of engines; those of chains are by the names in `KINDS`."""
_LINE = 0.17
"""Inches between the dots of a band."""
_GAP = 0.16
"""Inches between bands."""
_WIDTH = 5.0
"""Inches of a panel."""
_ROOM = 1.6
"""Width of a panel over its highest value: labels stand to the right of their dots."""


def figure(result: Result) -> Figure:
    """Draw the speed-ups over the first engine: batches side by side, a row for each load.

    A dot is a median and its line the range over the rounds. The number in a chain's dot is its
    length.
    """
    from matplotlib.figure import Figure

    batches = sorted({cell.batch for cell in result.cells()})
    loads = list(dict.fromkeys((cell.prompts, cell.temperature) for cell in result.cells()))
    cells = {(cell.prompts, cell.temperature, cell.batch): cell for cell in result.cells()}
    of_loads = [[cells[(*load, b)] for b in batches if (*load, b) in cells] for load in loads]
    heights = [_height(_bands(result, own)) + 0.7 for own in of_loads]
    drawn = Figure(figsize=(_WIDTH * len(batches) + 1.5, sum(heights)), layout="constrained")
    panels = drawn.subplots(
        len(loads), len(batches), squeeze=False, sharex=True,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for row, own in zip(panels, of_loads, strict=True):
        bands = _bands(result, own)
        for axis in row[len(own) :]:
            axis.set_visible(False)
        for axis, cell in zip(row, own, strict=False):
            _draw(axis, result, cell, bands)
            axis.set_title(cell.title, fontsize=13, loc="left")
        for axis in row[1:]:
            axis.tick_params(labelleft=False)
    for axis in panels[-1]:
        axis.set_xlabel(f"speed-up over {result.engines[0].name}", fontsize=12)
    highest = max(row.over_first.high for cell in result.cells() for row in rows(result, cell))
    panels[0][0].set_xlim(0, _ROOM * highest)
    return drawn


def _bands(result: Result, cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return the names of the engines that serve any of the cells, by the label of their band.

    Chains of one kind share a band; every other engine has its own.
    """
    served = {name for cell in cells for name in result.of(cell)}
    found: dict[str, list[str]] = {}
    for engine in result.engines:
        if engine.name in served:
            label = f"{KINDS[kind_of(engine)].name} of …" if engine.kind == "chain" else engine.name
            found.setdefault(label.replace(", ", ",\n"), []).append(engine.name)
    return found


def _height(bands: dict[str, list[str]]) -> float:
    """Return the inches that the bands take."""
    return sum(
        max(len(names), 1 + label.count("\n")) * _LINE + _GAP for label, names in bands.items()
    )


def _draw(axis: Any, result: Result, cell: Cell, bands: dict[str, list[str]]) -> None:
    found = {row.series.engine: row for row in rows(result, cell)}
    chain, tree = best_chain(result, cell), best_tree(result, cell)
    y, ticks = 0.0, []
    for number, (label, names) in enumerate(bands.items()):
        lines = max(len(names), 1 + label.count("\n"))
        if number % 2:
            axis.axhspan(y, y + lines * _LINE + _GAP, color="0.95", zorder=0)
        middle = y + (lines * _LINE + _GAP) / 2
        ticks.append(middle)
        for place, name in enumerate(names):
            if name in found:
                at = middle + (place - (len(names) - 1) / 2) * _LINE
                _dot(axis, result, found[name], at)
                if chain is not None and name == chain.engine:
                    _label(
                        axis, found[name], at, f"best chain {found[name].over_first.median:.2f}×"
                    )
                if tree is not None and name == tree.engine:
                    _label(axis, found[name], at, _of_tree(found[name]))
        y += lines * _LINE + _GAP
    axis.axvline(1, color="black", linewidth=1, zorder=1)
    if chain is not None:
        own = result.engine(chain.engine)
        middle = found[chain.engine].over_first.median
        axis.axvline(middle, color=_colour(own), linewidth=1.2, linestyle="--", zorder=1)
    axis.set_ylim(y, 0)
    axis.set_yticks(ticks, list(bands), fontsize=12)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=11, labelbottom=True)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _colour(engine: Engine) -> str:
    return _COLOURS[kind_of(engine) if engine.kind == "chain" else engine.kind]


def _of_tree(row: Row) -> str:
    over = "" if row.over_chain is None else f"\n{row.over_chain.median:.2f} × best chain"
    return f"best tree {row.over_first.median:.2f}×{over}"


def _label(axis: Any, row: Row, at: float, text: str) -> None:
    from matplotlib.patheffects import withStroke

    axis.annotate(
        text, (row.over_first.high, at), xytext=(9, 0), textcoords="offset points", va="center",
        fontsize=11, fontweight="bold", zorder=5,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def _dot(axis: Any, result: Result, row: Row, at: float) -> None:
    engine, ratio = result.engine(row.series.engine), row.over_first
    shade = _colour(engine)
    axis.plot([ratio.low, ratio.high], [at, at], color=shade, linewidth=2, alpha=0.55, zorder=2)
    axis.plot([ratio.median], [at], marker="o", markersize=11, color=shade, zorder=3)
    if engine.kind == "chain":
        axis.text(
            ratio.median, at, str(engine.budget), color="white", fontsize=8, fontweight="bold",
            ha="center", va="center_baseline", zorder=4,
        )  # fmt: skip


if __name__ == "__main__":
    drawn = figure(read(Path(sys.argv[1])))
    drawn.savefig(sys.argv[2], dpi=150, bbox_inches="tight")
