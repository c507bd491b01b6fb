"""The result as tables: in the terminal and for docs/papers.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from benchmarks.acceptance.paper import REPORTED
from dyntree_plugin.tune.posterior import Posterior

Result = dict[str, Any]
Cell = dict[str, Any]

FILLED = 0.95
"""Share of the budget that a dynamic threshold should fill."""
MORE_DRAFTING = 1.5
"""Most draft forwards it may take, of the fixed threshold's that accepts most."""

_UNLIMITED = 10_000
"""More characters than a line has."""

POSTERIOR_COLUMNS = ("T", "h, bits", "beta", "nodes", "predicted", "measured", "ratio")


def required_ratio(temperature: float) -> float:
    """What our best method should reach over Sequoia's tokens per step."""
    return 1.05 if temperature == 0 else 1.3


def show(console: Console, result: Result) -> None:
    """Everything there is to say of a result."""
    figures = (
        ("tokens per step", "tokens_per_step", "{:.2f}"),
        ("draft forwards per step", "draft_forwards_per_step", "{:.1f}"),
        ("nodes per step", "nodes_per_step", "{:.1f}"),
        ("modelled speed-up", "modelled_speedup", "{:.2f}"),
    )
    for title, key, form in figures:
        for table in cells_tables(console, result, title, key, form):
            console.print(table)
    console.print(Text(modelled_note(result), style="dim"))
    console.print(ratio_table(result))
    if result["posterior"]:
        console.print(posterior_table(result))
    if result["threshold_sweep"]:
        console.print(threshold_table(result))
    console.print(paper_table(result))


def modelled_note(result: Result) -> str:
    return (
        "Modelled speed-up: tokens per step × t_target(1 row) / (t_target(tree) + draft forwards × "
        f"t_draft(rows)); step times {result['step_times']['source']}. Not a measured speed."
    )


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


def cells_tables(
    console: Console, result: Result, title: str, key: str, form: str
) -> Iterator[Table]:
    """Yield tables that the console has room for, each with some of the temperatures and budgets.

    A temperature and its budgets stay together where a table has room for them.
    """

    def fits(columns: Sequence[tuple[float, int]]) -> bool:
        table = _cells_table(result, columns, title, key, form)
        unlimited = console.options.update(max_width=_UNLIMITED)
        return Measurement.get(console, unlimited, table).maximum <= console.width

    left = places(result)
    while left:
        count = next((n for n in range(len(left), 1, -1) if fits(left[:n])), 1)
        ends = [n for n in range(1, count) if left[n - 1][0] != left[n][0]]
        if count < len(left) and left[count - 1][0] == left[count][0] and ends:
            count = ends[-1]
        yield _cells_table(result, left[:count], title, key, form)
        left = left[count:]


def _table(title: str, *names: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False,
        padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    return table


def _cells_table(
    result: Result, columns: Sequence[tuple[float, int]], title: str, key: str, form: str
) -> Table:
    """Return a row per method and a column per temperature and budget; a column's best is bold."""
    table = _table(
        title, "method", *(f"T={temperature:g}\n{budget}" for temperature, budget in columns)
    )
    table.columns[0].justify = "left"
    best = {
        place: max(c[key] for c in result["cells"] if (c["temperature"], c["budget"]) == place)
        for place in columns
    }
    emphasised = key in ("tokens_per_step", "modelled_speedup")
    for method, label in _methods(result).items():
        row: list[RenderableType] = [label]
        for place in columns:
            cell = find(result["cells"], method, *place)
            wins = cell is not None and emphasised and cell[key] == best[place]
            said = "" if cell is None else form.format(cell[key])
            row.append(Text(said, style="bold green" if wins else ""))
        table.add_row(*row)
    return table


def ratio_table(result: Result) -> Table:
    """Our best against Sequoia and the chain; what falls short of the goal is red."""
    names = ("T", "budget", "ours", "over Sequoia", "goal", "over chain")
    table = _table("our best over others, tokens per step", *names)
    for temperature, budget in places(result):
        ours = best_of_ours(result, temperature, budget)
        if ours is None:
            continue
        goal = required_ratio(temperature)
        row: list[RenderableType] = [f"{temperature:g}", str(budget), ours["label"]]
        for method, least in (("sequoia", goal), ("chain", 1.0)):
            other = find(result["cells"], method, temperature, budget)
            if other is None:
                row.append("")
                continue
            ratio = ours["tokens_per_step"] / other["tokens_per_step"]
            row.append(Text(f"{ratio:.2f}×", style="green" if ratio >= least else "bold red"))
        row.insert(4, f"{goal:.2f}×")
        table.add_row(*row)
    return table


def posterior_rows(result: Result) -> list[tuple[str, ...]]:
    """What the posterior entropy foretells of each temperature and budget, beside the tokens per
    step of the trees that the law is of: with learned values, and candidates of the first draft
    alone."""
    rows = []
    for found in (Posterior(**each) for each in result["posterior"]):
        what = (f"{found.temperature:g}", f"{found.bits:.2f}", f"{found.beta:.2f}")
        for budget in (budget for t, budget in places(result) if t == found.temperature):
            foretold = found.tokens_per_step(budget)
            cell = find(result["cells"], "calibrated", found.temperature, budget)
            measured = None if cell is None else float(cell["tokens_per_step"])
            ratio = None if foretold is None or measured is None else measured / foretold
            told = ("–" if x is None else f"{x:.2f}" for x in (foretold, measured, ratio))
            rows.append((*what, str(budget), *told))
    return rows


def posterior_table(result: Result) -> Table:
    """What the posterior entropy foretells, beside what was measured."""
    title = "tokens per step, predicted by the posterior entropy h and measured"
    table = _table(title, *POSTERIOR_COLUMNS)
    for row in posterior_rows(result):
        table.add_row(*row)
    return table


def posterior_markdown(result: Result) -> str:
    """Return the table of the posterior entropy for a page; below it what was run."""
    lines = [POSTERIOR_COLUMNS, ["---:"] * len(POSTERIOR_COLUMNS), *posterior_rows(result)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    s = result["settings"]
    return f"{table}\n\n" + (
        f"{s['prompts']} prompts × {s['tokens']} tokens; no tree is deeper than {s['max_depth']} "
        f"nodes. beta was fitted on {s['calibration']} other prompts."
    )


def threshold_table(result: Result) -> Table:
    """The dynamic threshold against fixed ones: how full the budget, at what price."""
    names = ("T", "budget", "threshold", "budget filled", "draft forwards", "tokens per step")
    table = _table(f"thresholds, on {result['settings']['threshold_prompts']} prompts", *names)
    for place in dict.fromkeys((c["temperature"], c["budget"]) for c in result["threshold_sweep"]):
        cells = [c for c in result["threshold_sweep"] if (c["temperature"], c["budget"]) == place]
        dynamic = find(cells, "dynamic_threshold", *place)
        fixed = [c for c in cells if c is not dynamic]
        best = max(fixed, key=lambda c: float(c["tokens_per_step"]))
        for cell in cells:
            filled = cell["nodes_per_step"] / cell["budget"]
            forwards = cell["draft_forwards_per_step"]
            name, style = cell["label"], ""
            if cell is best:
                name += " (best)"
            if cell is dynamic:
                dear = forwards > MORE_DRAFTING * best["draft_forwards_per_step"]
                style = "bold red" if dear or filled < FILLED else "green"
            row = (f"{filled:.0%}", f"{forwards:.1f}", f"{cell['tokens_per_step']:.2f}")
            table.add_row(f"{place[0]:g}", str(place[1]), name, *row, style=style)
    return table


def paper_table(result: Result) -> Table:
    """The papers' ratios beside those measured here at the same budget and temperature."""
    names = ("T", "budget", "pair", "DySpec / Sequoia", "DySpec / SpecInfer")
    table = _table("ratios of tokens per step, in the DySpec paper and here", *names)
    for told in REPORTED:
        place = (told.temperature, told.budget)
        row = (f"{told.over_sequoia:.2f}×", f"{told.over_specinfer:.2f}×")
        source = f"{told.pair} (Table {told.table})"
        table.add_row(f"{place[0]:g}", str(place[1]), source, *row)
    for place in places(result):
        cells = [find(result["cells"], m, *place) for m in ("dyspec", "sequoia", "expansion")]
        mine, *others = (None if c is None else float(c["tokens_per_step"]) for c in cells)
        if mine is not None:
            ratios = ("" if other is None else f"{mine / other:.2f}×" for other in others)
            table.add_row(f"{place[0]:g}", str(place[1]), "measured here", *ratios, style="bold")
    return table


def markdown_table(result: Result) -> str:
    """Tokens per step of every method, and our best over those papers' that were measured; below
    it what was run."""
    columns = places(result)
    head = ["tokens per step", *(f"T={t:g}, {n} nodes" for t, n in columns)]
    rows = []
    for method, label in _methods(result).items():
        cells = [find(result["cells"], method, *place) for place in columns]
        rows.append([label, *("–" if c is None else f"{c['tokens_per_step']:.2f}" for c in cells)])
    compared = (("sequoia", "Sequoia"), ("chain", "chain"))
    for method, label in ((name, label) for name, label in compared if name in _methods(result)):
        row = [f"our best / {label}"]
        for place in columns:
            ours, other = best_of_ours(result, *place), find(result["cells"], method, *place)
            if ours is None or other is None:
                row.append("–")
            else:
                row.append(f"{ours['tokens_per_step'] / other['tokens_per_step']:.2f}×")
        rows.append(row)
    lines = [head, ["---", *["---:"] * len(columns)], *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    s = result["settings"]
    return f"{table}\n\n" + (
        f"{s['prompts']} prompts × {s['tokens']} tokens; no tree is deeper than {s['max_depth']} "
        f"nodes. Sequoia's P and our values were learned on {s['calibration']} other prompts. A "
        "step without speculation makes 1 token."
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


def heading(result: Result) -> Group:
    """What was run, and on what."""
    s, where = result["settings"], result["provenance"]
    return Group(
        Text(f"{s['target']} ← {s['draft']}", style="bold"),
        Text(
            f"{s['prompts']} prompts × {s['tokens']} tokens, {s['calibration']} other prompts to "
            f"calibrate on, max depth {s['max_depth']}, seed {s['seed']}; "
            f"{where['cpu'] or where['gpu']}, commit {where['commit']}",
            style="dim",
        ),
    )
