"""The result as pictures: matplotlib, one file each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.acceptance.report import Result, places

_FEWEST = 20
"""Nodes that a bin needs to be drawn."""


def draw(result: Result, folder: Path) -> list[Path]:
    """Write every picture into ``folder``; their paths."""
    mpl.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "tokens-over-budget": _over_budget(result),
        "acceptance-by-depth": _by_depth(result),
        "draft-probability": _reliability(
            result, ("dyspec", "topk"), "draft probability", "acceptance rate"
        ),
        "value-reliability": _reliability(
            result, ("coupled", "calibrated"), "estimated chance", "share accepted"
        ),
    }
    written = []
    for name, figure in pictures.items():
        path = folder / f"acceptance-{name}.png"
        figure.savefig(path, dpi=150)
        written.append(path)
    return written


def _panels(result: Result) -> tuple[Figure, list[tuple[float, Axes]]]:
    """One panel for each temperature."""
    temperatures = list(dict.fromkeys(t for t, _ in places(result)))
    figure = Figure(figsize=(4.2 * len(temperatures), 3.8), layout="constrained")
    axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for temperature, panel in zip(temperatures, axes, strict=True):
        panel.set_title(f"T = {temperature:g}")
        panel.grid(alpha=0.3)
    return figure, list(zip(temperatures, axes, strict=True))


def _colours(result: Result) -> dict[str, Any]:
    methods = list(dict.fromkeys(c["method"] for c in result["cells"]))
    return {method: f"C{place % 10}" for place, method in enumerate(methods)}


def _over_budget(result: Result) -> Figure:
    figure, panels = _panels(result)
    colours = _colours(result)
    for temperature, panel in panels:
        here = [c for c in result["cells"] if c["temperature"] == temperature]
        for method in dict.fromkeys(c["method"] for c in here):
            cells = sorted((c for c in here if c["method"] == method), key=lambda c: c["budget"])
            panel.plot(
                [c["budget"] for c in cells],
                [c["tokens_per_step"] for c in cells],
                marker="o",
                linestyle="-" if cells[0]["ours"] else "--",
                color=colours[method],
                label=cells[0]["label"],
            )
        panel.set_xscale("log", base=2)
        budgets = sorted({c["budget"] for c in here})
        panel.set_xticks(budgets, [str(budget) for budget in budgets])
        panel.set_xlabel("nodes per tree")
    panels[0][1].set_ylabel("tokens per step")
    panels[-1][1].legend(fontsize="x-small")
    return figure


def _by_depth(result: Result) -> Figure:
    """The share of steps that accept at least so many nodes, at the largest budget."""
    figure, panels = _panels(result)
    colours = _colours(result)
    for temperature, panel in panels:
        here = [c for c in result["cells"] if c["temperature"] == temperature]
        budget = max(c["budget"] for c in here)
        for cell in (c for c in here if c["budget"] == budget):
            steps = np.array(cell["steps_by_accepted"])
            reached = steps[::-1].cumsum()[::-1] / steps.sum()
            panel.plot(
                range(1, len(reached)),
                reached[1:],
                linestyle="-" if cell["ours"] else "--",
                color=colours[cell["method"]],
                label=cell["label"],
            )
        panel.set_title(f"T = {temperature:g}, {budget} nodes")
        panel.set_xlabel("depth")
    panels[0][1].set_ylabel("share of steps that accept this deep")
    panels[-1][1].legend(fontsize="x-small")
    return figure


def _reliability(result: Result, methods: tuple[str, ...], given: str, came: str) -> Figure:
    """Of nodes whose parent was accepted: how often they were, by the chance they were given."""
    figure, panels = _panels(result)
    colours = _colours(result)
    for temperature, panel in panels:
        panel.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for method in methods:
            cells = [
                c
                for c in result["cells"]
                if c["method"] == method and c["temperature"] == temperature
            ]
            if not cells:
                continue
            nodes, chances, taken = np.sum([c["edge_reliability"] for c in cells], axis=0).T
            drawn = nodes >= _FEWEST
            panel.plot(
                chances[drawn] / nodes[drawn],
                taken[drawn] / nodes[drawn],
                marker="o",
                color=colours[method],
                label=cells[0]["label"],
            )
        panel.set_xlabel(given)
        panel.legend(fontsize="x-small")
    panels[0][1].set_ylabel(came)
    return figure
