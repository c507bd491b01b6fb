"""Draw the best chain and the best tree of every cell, a panel for each result.

python -m benchmarks.serve.at_a_glance PICTURE TITLE=RESULT …
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyntree_plugin.commands.bench.results import Result, read
from dyntree_plugin.commands.bench.summary import best_chain, best_tree, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = {"vLLM's best chain": "#2E95D3", "best tree": "#009E73"}
_WIDTH = 0.38
"""Of a bar, if cells are 1 apart."""


def figure(results: Mapping[str, Result]) -> Figure:
    """Draw speed-ups over no speculation. A number is the tree's speed over the best chain's."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 3.2), layout="constrained")
    panels = drawn.subplots(
        1, len(results), sharey=True, squeeze=False,
        gridspec_kw={"width_ratios": [len([*result.cells()]) for result in results.values()]},
    )[0]  # fmt: skip
    for axis, (title, result) in zip(panels, results.items(), strict=True):
        _draw(axis, result)
        axis.set_title(title, fontsize=12, loc="left")
    panels[0].set_ylabel("speed-up over\nno speculation", fontsize=11)
    panels[-1].legend(fontsize=10, frameon=False, loc="upper right")
    return drawn


def _draw(axis: Any, result: Result) -> None:
    cells = sorted(result.cells(), key=lambda cell: (cell.temperature, cell.batch))
    for place, cell in enumerate(cells):
        found = {row.series.engine: row for row in rows(result, cell)}
        chain, tree = best_chain(result, cell), best_tree(result, cell)
        over = None if tree is None else found[tree.engine].over_chain
        if chain is None or tree is None or over is None:
            raise ValueError(f"{cell.title} has no chain or no tree")
        heights = [found[each.engine].over_first.median for each in (chain, tree)]
        for side, height, shade in zip((-0.5, 0.5), heights, _SHADES.values(), strict=True):
            axis.bar(place + side * _WIDTH, height, _WIDTH, color=shade)
        axis.text(
            place + _WIDTH / 2, heights[1] + 0.06, f"{over.median:.2f}", ha="center", fontsize=10,
            fontweight="bold", color="black" if over.median >= 1 else "#B00020",
        )  # fmt: skip
    axis.axhline(1, color="black", linewidth=1)
    axis.margins(y=0.12)
    labels = [f"T {cell.temperature:g}\nbatch {cell.batch}" for cell in cells]
    axis.set_xticks(range(len(cells)), labels, fontsize=10)
    axis.tick_params(axis="x", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    for name, shade in _SHADES.items():
        axis.bar(0, 0, color=shade, label=name)


if __name__ == "__main__":
    named = dict(each.split("=", 1) for each in sys.argv[2:])
    picture = figure({title: read(Path(path)) for title, path in named.items()})
    picture.savefig(sys.argv[1], dpi=150, bbox_inches="tight")
