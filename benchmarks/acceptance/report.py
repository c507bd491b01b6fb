"""The result as Markdown tables, in the terminal and for benchmarks/results/README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from dyntree_plugin.tune.posterior import Posterior

Result = dict[str, Any]
Cell = dict[str, Any]

POSTERIOR_COLUMNS = ("T", "h, bits", "beta", "nodes", "predicted", "measured", "ratio")


def show(console: Console, result: Result) -> None:
    """Print what was run, and its tables."""
    s, where = result["settings"], result["provenance"]
    parts = [
        f"{s['target']} ← {s['draft']}\n{s['calibration']} other prompts to calibrate on, seed "
        f"{s['seed']}; {where['cpu'] or where['gpu']}, commit {where['commit']}",
        markdown_table(result),
        _table(_figures(result, "draft forwards per step", "draft_forwards_per_step", "{:.1f}")),
        _table(_figures(result, "nodes per step", "nodes_per_step", "{:.1f}")),
        posterior_markdown(result),
    ]
    console.print("\n\n".join(parts), markup=False, soft_wrap=True)


def places(result: Result) -> list[tuple[float, int]]:
    """(temperature, budget) of the cells, in the order measured."""
    return list(dict.fromkeys((c["temperature"], c["budget"]) for c in result["cells"]))


def find(cells: Iterable[Cell], method: str, temperature: float, budget: int) -> Cell | None:
    place = (method, temperature, budget)
    return next((c for c in cells if (c["method"], c["temperature"], c["budget"]) == place), None)


def best_of_ours(result: Result, temperature: float, budget: int) -> Cell | None:
    """Our method of most tokens per step there."""
    here = (temperature, budget)
    ours = [c for c in result["cells"] if c["ours"] and (c["temperature"], c["budget"]) == here]
    return max(ours, key=lambda c: float(c["tokens_per_step"]), default=None)


def _methods(result: Result) -> dict[str, str]:
    """Labels by name, in the order of the warmest cells, which every method has."""
    warmest = max(c["temperature"] for c in result["cells"])
    last = [c for c in result["cells"] if c["temperature"] == warmest]
    return {c["method"]: c["label"] for c in last}


def _figures(result: Result, title: str, key: str, form: str) -> Iterator[Sequence[str]]:
    """Yield the lines of a table with a row per method, and a column per temperature and budget."""
    columns = places(result)
    yield [title, *(f"T={t:g}, {n} nodes" for t, n in columns)]
    yield ["---", *["---:"] * len(columns)]
    for method, label in _methods(result).items():
        cells = [find(result["cells"], method, *place) for place in columns]
        yield [label, *("–" if c is None else form.format(c[key]) for c in cells)]


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ratios(result: Result) -> Iterator[Sequence[str]]:
    """Yield our best method's tokens per step over those of the papers' that were measured."""
    compared = (("sequoia", "Sequoia"), ("chain", "chain"))
    for method, label in ((name, label) for name, label in compared if name in _methods(result)):
        row = [f"our best / {label}"]
        for place in places(result):
            ours, other = best_of_ours(result, *place), find(result["cells"], method, *place)
            if ours is None or other is None:
                row.append("–")
            else:
                row.append(f"{ours['tokens_per_step'] / other['tokens_per_step']:.2f}×")
        yield row


def markdown_table(result: Result) -> str:
    """Tokens per step of every method, and our best over those papers' that were measured; below
    it what was run."""
    table = _table(
        [*_figures(result, "tokens per step", "tokens_per_step", "{:.2f}"), *_ratios(result)]
    )
    return (
        f"{table}\n\n{_what_was_run(result)} Sequoia's P and our values were learned on "
        f"{result['settings']['calibration']} other prompts. A step without speculation makes 1 "
        "token."
    )


def _what_was_run(result: Result) -> str:
    s = result["settings"]
    return (
        f"{s['prompts']} prompts × {s['tokens']} tokens; no tree is deeper than {s['max_depth']} "
        "nodes."
    )


def posterior_markdown(result: Result) -> str:
    """What the posterior entropy foretells of each temperature and budget, beside the tokens per
    step of the trees that the formula is for: with learned values, and candidates of the first
    draft alone."""
    rows: list[Sequence[str]] = [POSTERIOR_COLUMNS, ["---:"] * len(POSTERIOR_COLUMNS)]
    for found in (Posterior(**each) for each in result["posterior"]):
        what = (f"{found.temperature:g}", f"{found.bits:.2f}", f"{found.beta:.2f}")
        for budget in (budget for t, budget in places(result) if t == found.temperature):
            foretold = found.tokens_per_step(budget)
            cell = find(result["cells"], "calibrated", found.temperature, budget)
            measured = None if cell is None else float(cell["tokens_per_step"])
            ratio = None if foretold is None or measured is None else measured / foretold
            shown = ("–" if x is None else f"{x:.2f}" for x in (foretold, measured, ratio))
            rows.append((*what, str(budget), *shown))
    return (
        f"{_table(rows)}\n\n{_what_was_run(result)} beta was fitted on "
        f"{result['settings']['calibration']} other prompts."
    )


def drawn_markdown(results: Sequence[Result]) -> str:
    """Compare drawn trees with the block chain of the most tokens among those of as many nodes at
    most, on the same prompts."""
    cells = [cell for result in results for cell in result["cells"]]
    lines = [
        "| temperature | nodes | coupled tree | best block chain | drawn tree | tree / chain |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for tree in (cell for cell in cells if cell["method"] == "traversal"):
        here, budget = tree["temperature"], tree["budget"]
        chain = max(
            (c for c in cells if (c["method"], c["temperature"]) == ("block", here)
             and c["budget"] <= budget),
            key=lambda c: float(c["expected_tokens_per_step"]),
        )  # fmt: skip
        coupled = find(cells, "calibrated", here, budget)
        figures = ["–" if c is None else _with_error(c) for c in (coupled, chain, tree)]
        quotient, error = ratio(tree, chain)
        line = [f"{here:g}", str(budget), *figures, f"{quotient:.2f} ± {error:.2f}"]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def _with_error(cell: Cell) -> str:
    return f"{cell['expected_tokens_per_step']:.2f} ± {cell['standard_error']:.2f}"


def ratio(cell: Cell, other: Cell) -> tuple[float, float]:
    """Return how many times another cell's tokens per step a cell has on the same prompts, and the
    standard error over prompts."""
    means, off = [], []
    for each in (cell, other):
        steps, tokens = zip(*each["by_prompt"], strict=True)
        means.append(sum(tokens) / sum(steps))
        off.append([t / sum(tokens) - s / sum(steps) for s, t in each["by_prompt"]])
    squares = sum((a - b) ** 2 for a, b in zip(*off, strict=True))
    return means[0] / means[1], means[0] / means[1] * float(squares**0.5)
