"""A result as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dyntree_plugin.commands.bench.results import Cell, Result
from dyntree_plugin.commands.bench.summary import Row, best_chain, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "plain": "0.5", "chain": "tab:blue", "static tree": "tab:orange", "dynamic tree": "tab:green",
    "server": "tab:purple",
}  # fmt: skip
MARKERS = "osD^vP*X"
"""Of the engines of one kind, which share its colour."""
_STAGES = ("target", "draft", "grow", "walk", "move", "sample")
_OTHER = "scheduler and the rest"


def draw(result: Result, folder: Path) -> list[Path]:
    """Write every picture that this result has points for; their files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in _figures(result):
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=150, bbox_inches="tight")
    return written


def _figures(result: Result) -> Iterator[tuple[str, Figure]]:
    budgets = [engine.budget for engine in result.engines]
    if any(engine.kind == "plain" for engine in result.engines):
        yield "speed_up_over_batch", speed_up_over_batch(result)
    if any(budgets):
        yield "tokens_per_step_over_budget", tokens_over_budget(result)
    if any(run.stages_ms for series in result.series for run in series.runs):
        yield "time_per_stage", time_per_stage(result)


def speed_up_over_batch(result: Result) -> Figure:
    """Of every engine over no speculation; below the line it loses."""
    groups = _by_load(result)
    figure, axes = _axes(len(groups))
    for axis, ((prompts, temperature), cells) in zip(axes, groups.items(), strict=True):
        lines: dict[str, list[tuple[int, Row]]] = {}
        for cell in cells:
            for row in rows(result, cell):
                lines.setdefault(row.series.engine, []).append((cell.batch, row))
        for name, points in lines.items():
            ratios = [row.over_first for _, row in points]
            middle = [ratio.median for ratio in ratios]
            errors = [
                [ratio.median - ratio.low for ratio in ratios],
                [ratio.high - ratio.median for ratio in ratios],
            ]
            kind = result.engine(name).kind
            of_kind = [engine.name for engine in result.engines if engine.kind == kind]
            axis.errorbar(
                [batch for batch, _ in points], middle, errors, label=name,
                marker=MARKERS[of_kind.index(name) % len(MARKERS)], color=COLOURS[kind],
                linestyle="--" if kind == "chain" else "-", capsize=3,
            )  # fmt: skip
        axis.axhline(1, color="black", linewidth=0.8)
        batches = sorted({cell.batch for cell in cells})
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set(title=_load_title(prompts, temperature), xlabel="batch")
    axes[0].set_ylabel("speed-up over no speculation")
    figure.legend(
        *axes[-1].get_legend_handles_labels(), fontsize="small", loc="outside right center"
    )
    return figure


def tokens_over_budget(result: Result) -> Figure:
    """Tokens per target step over the draft tokens that it verifies, at the smallest batch."""
    groups = _by_load(result)
    figure, axes = _axes(len(groups))
    for axis, ((prompts, temperature), cells) in zip(axes, groups.items(), strict=True):
        cell = min(cells, key=lambda cell: cell.batch)
        points: dict[str, list[tuple[int, float]]] = {}
        for row in rows(result, cell):
            engine = result.engine(row.series.engine)
            if engine.budget and row.tokens_per_step is not None:
                points.setdefault(engine.kind, []).append((engine.budget, row.tokens_per_step))
        for kind, of_kind in points.items():
            budgets, tokens = zip(*sorted(of_kind), strict=True)
            axis.plot(budgets, tokens, marker="o", label=kind, color=COLOURS[kind])
        axis.set(
            title=f"{_load_title(prompts, temperature)}, batch {cell.batch}",
            xlabel="draft tokens per step",
        )
        axis.set_ylim(bottom=1)
    axes[0].set_ylabel("tokens per target step")
    figure.legend(
        *axes[-1].get_legend_handles_labels(), fontsize="small", loc="outside right center"
    )
    return figure


def time_per_stage(result: Result) -> Figure:
    """Milliseconds of a step by stage: no speculation, the best chain, and every tree."""
    cells = list(result.cells())
    figure, axes = _axes(len(cells))
    for axis, cell in zip(axes, cells, strict=True):
        chosen = [row for row in rows(result, cell) if _is_shown(result, cell, row)]
        names = [row.series.engine for row in chosen]
        reached = [0.0] * len(chosen)
        for stage in (*_STAGES, _OTHER):
            heights = [_stage_ms(row, stage) for row in chosen]
            axis.barh(names, heights, left=reached, label=stage)
            reached = [sum(ends) for ends in zip(reached, heights, strict=True)]
        axis.set_title(f"{_load_title(cell.prompts, cell.temperature)}, batch {cell.batch}")
        axis.set_xlabel("ms per step")
        axis.invert_yaxis()
    figure.legend(
        *axes[-1].get_legend_handles_labels(), fontsize="small", loc="outside right center"
    )
    return figure


def _is_shown(result: Result, cell: Cell, row: Row) -> bool:
    best = best_chain(result, cell)
    is_chain = result.engine(row.series.engine).kind == "chain"
    return not is_chain or (best is not None and best.engine == row.series.engine)


def _stage_ms(row: Row, stage: str) -> float:
    runs = row.series.runs
    if stage == _OTHER:
        whole = fmean(run.step_ms for run in runs)
        return whole - sum(_stage_ms(row, each) for each in _STAGES)
    return sum(run.stages_ms.get(stage, 0.0) for run in runs) / len(runs)


def _by_load(result: Result) -> dict[tuple[str, float], list[Cell]]:
    def load(cell: Cell) -> tuple[str, float]:
        return cell.prompts, cell.temperature

    return {key: list(cells) for key, cells in groupby(sorted(result.cells(), key=load), load)}


def _load_title(prompts: str, temperature: float) -> str:
    return f"{prompts}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"


def _axes(count: int) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * count + 2, 4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
