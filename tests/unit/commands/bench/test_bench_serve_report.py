"""The report of a result of `dyntree bench serve`, and its agreement with published results."""

from __future__ import annotations

import io
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.serve import plots
from dyntree_plugin.commands.bench import overview, summary, table, terminal
from dyntree_plugin.commands.bench.chains import serves
from dyntree_plugin.commands.bench.results import Cell, Result, Series, read
from dyntree_plugin.commands.loads.runs import Engine, Run, Speculation

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "benchmarks" / "results").glob("serve-*.json"))
CELL = Cell(prompts="code", temperature=0.0, batch=1)


def run(number: int, tpot: float, accepted: int = 0, drafts: int = 0) -> Run:
    return Run(
        round=number,
        requests=2,
        seconds=1.0,
        output_tokens=100,
        tpot_ms=tpot,
        ttft_ms=5.0,
        steps=50,
        step_ms=12.0,
        stages_ms={"target": 8.0, "draft": 3.0},
        speculation=Speculation(drafts=drafts, draft_tokens=4 * drafts, accepted_tokens=accepted),
    )


ENGINES = {
    "no speculation": ("plain", 0, [20.0, 40.0, 30.0], 0),
    "chain of 1": ("chain", 1, [15.0, 30.0, 20.0], 10),
    "chain of 4": ("chain", 4, [10.0, 20.0, 15.0], 20),
    "dynamic tree of 4": ("dynamic tree", 4, [8.0, 16.0, 10.0], 30),
    "dynamic tree of 64": ("dynamic tree", 64, [25.0, 50.0, 33.0], 60),
}


def result(cells: tuple[Cell, ...] = (CELL,), **engines: Any) -> Result:
    chosen = engines or ENGINES
    return Result(
        provenance={"commit": "abc"},
        settings={},
        notes=["a note"],
        engines=[
            Engine(name=name, kind=kind, budget=budget, arguments={})
            for name, (kind, budget, _, _) in chosen.items()
        ],
        series=[
            Series(
                engine=name,
                cell=cell,
                runs=[
                    run(number, tpot, accepted, 10 if accepted else 0)
                    for number, tpot in enumerate(times)
                ],
                differing_requests=0,
                differing_tokens=0,
                compared_tokens=100,
            )
            for cell in cells
            for name, (_, _, times, accepted) in chosen.items()
        ],
    )


def by_engine(found: Result) -> dict[str, summary.Row]:
    return {row.series.engine: row for row in summary.rows(found, CELL)}


def test_ratios_are_taken_within_each_round_and_against_the_best_chain() -> None:
    rows = by_engine(result())
    best = summary.best_chain(result(), CELL)
    assert best is not None
    assert best.engine == "chain of 4"
    tree = rows["dynamic tree of 4"]
    # The ratios are 20 / 8, 40 / 16 and 30 / 10. Medians would also give 30 / 10, but no spread.
    assert (tree.over_first.median, tree.over_first.low, tree.over_first.high) == (2.5, 2.5, 3.0)
    assert tree.over_chain is not None
    assert tree.over_chain.median == pytest.approx(1.25)
    assert rows["no speculation"].over_first.high == 1.0


def shown(result: Result, width: int, colours: bool = False) -> list[str]:
    """Return the lines that the terminal shows, without the blanks at their ends."""
    stream = io.StringIO()
    system = "standard" if colours else None
    console = Console(
        file=stream, force_terminal=colours, width=width, color_system=system, highlight=False
    )
    terminal.show(console, result)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_losing_cells_are_red_and_none_is_dropped() -> None:
    lines = {name: line for line in shown(result(), 200, colours=True) for name in ENGINES
             if re.sub(r"\x1b\[[0-9;]*m", "", line).startswith(f"{name} ")}  # fmt: skip
    assert set(lines) == set(ENGINES)
    red = re.compile(r"\x1b\[[0-9;]*31m")
    losing = {name for name, line in lines.items() if red.search(line)}
    assert losing == {"dynamic tree of 64"}
    assert len(red.findall(lines["dynamic tree of 64"])) == 2  # against both


def test_the_picture_has_a_panel_for_every_cell() -> None:
    cells = (CELL, CELL.model_copy(update={"batch": 4}), CELL.model_copy(update={"prompts": "x"}))
    drawn = plots.figure(result(cells))
    assert [axis.get_title(loc="left") for axis in drawn.axes if axis.get_visible()] == [
        cell.title for cell in cells
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_result_has_provenance_and_in_every_cell_what_serves_it(path: Path) -> None:
    found = read(path)
    assert found.provenance["commit"]
    assert found.provenance["cpu"] or found.provenance["gpu"]
    wanted = found.settings["rounds"]
    # A time limit may have ended the measurement; then a note tells the rounds of every cell.
    (cut,) = [note for note in found.notes if note.startswith("Rounds measured")] or [""]
    told = sorted(map(int, re.findall(r"(\d+) at temperature", cut)))
    measured = []
    for cell in found.cells():
        served = [each.name for each in found.engines if serves(each, cell.temperature)]
        assert {*served} <= found.of(cell).keys()
        (rounds,) = {len(series.runs) for series in found.of(cell).values()}
        measured.append(rounds)
    assert sorted(measured) == (told or [wanted] * len(measured))
    assert 0 not in measured
    assert max(measured) <= wanted


def test_the_page_of_results_names_every_file() -> None:
    results = ROOT / "benchmarks" / "results"
    named = re.findall(r"`([\w*-]+)`", (results / "README.md").read_text())
    for path in results.glob("*.json"):
        assert any(fnmatch(path.stem, name) for name in named), path


SHOWN = pytest.mark.parametrize("name", ["serve-llama-1b", "serve-llama-1b-zen5"])


@SHOWN
def test_the_page_and_the_readme_say_by_which_measure_the_tree_is_how_fast(name: str) -> None:
    found = read(ROOT / "benchmarks" / "results" / f"{name}.json")
    count = {7: "seven", 4: "four"}[sum(each.kind == "chain" for each in found.engines)]
    said, at_first = (
        " ".join((ROOT / page).read_text().split()) for page in ("docs/results.md", "README.md")
    )
    ratios: dict[str, list[float]] = {name: [] for name in ("per token", "throughput")}
    over_chain: dict[str, list[float]] = {name: [] for name in ratios}
    for cell in found.cells():
        rows = {row.series.engine: row for row in summary.rows(found, cell)}
        plain, tree = rows["no speculation"], rows["dynamic tree of 16"]
        assert tree.over_chain is not None
        chains = [row for name, row in rows.items() if found.engine(name).kind == "chain"]
        most = max(chain.tokens_per_second.median for chain in chains)
        ratios["per token"].append(tree.over_first.median)
        ratios["throughput"].append(tree.tokens_per_second.median / plain.tokens_per_second.median)
        over_chain["per token"].append(tree.over_chain.median)
        over_chain["throughput"].append(tree.tokens_per_second.median / most)

    def span(values: list[float], digits: int) -> str:
        return f"{min(values):.{digits}f} to {max(values):.{digits}f} times"

    per_token, throughput = (span(values, 1) for values in ratios.values())
    assert f"tree of 16 nodes with default options was {per_token} as fast as no" in said
    assert f"By throughput, the tokens per second of all requests, it was {throughput}" in said
    if name == "serve-llama-1b":
        assert f"{per_token} as fast per token as no speculation" in at_first
    per_token, throughput = (span(values, 2) for values in over_chain.values())
    assert f"it is {per_token} as fast per token, and {throughput} by throughput" in said
    assert f"{per_token} as fast as the best of {count} of vLLM's chains" in at_first


def test_the_page_says_what_large_batches_gain() -> None:
    found = read(ROOT / "benchmarks" / "results" / "serve-llama-1b-zen5.json")
    ratios = {}
    for cell in found.cells():
        rows = {
            row.series.engine: row.tokens_per_second.median for row in summary.rows(found, cell)
        }
        ratios[cell.temperature, cell.batch] = rows["dynamic tree of 16"] / rows["no speculation"]
    said = " ".join((ROOT / "docs" / "results.md").read_text().split())
    greedy, drawn = (f"{ratios[temperature, 16]:.2f}" for temperature in (0, 1))
    assert f"has {greedy} of the tokens of no speculation at temperature 0" in said
    assert f"and {drawn} times as many at 1" in said


@pytest.mark.parametrize("name", ["serve-llama-1b", "serve-llama-1b-zen5"])
def test_the_readme_shows_the_cell_in_which_the_tree_loses(name: str) -> None:
    found = read(ROOT / "benchmarks" / "results" / f"{name}.json")
    said = (ROOT / "README.md").read_text()
    lost = 0
    for cell in found.cells():
        rows = {row.series.engine: row for row in summary.rows(found, cell)}
        tree, chain = rows["dynamic tree of 16"], summary.best_chain(found, cell)
        assert tree.over_chain is not None
        assert chain is not None
        if tree.over_chain.median < 1:
            lost += 1
            own, best = tree.tpot_ms.median, rows[chain.engine].tpot_ms.median
            told = f"tree of 16: {own:.1f} ms per token; vLLM's {chain.engine}: {best:.1f} |"
            assert f"temperature {cell.temperature:g}, batch {cell.batch} | {told}" in said
    assert lost == 1


def test_the_overview_has_a_line_per_engine_and_a_ratio_per_cell() -> None:
    stream = io.StringIO()
    sampled = CELL.model_copy(update={"temperature": 1.0, "batch": 8})
    overview.show(Console(file=stream, width=80), result((CELL, sampled)))
    temperatures, batches = (
        line.split() for line in stream.getvalue().splitlines() if re.match(r" +[TB] ", line)
    )
    assert (temperatures, batches) == (["T", "0", "T", "1"], ["B", "1", "B", "8"])
    (line,) = [x for x in stream.getvalue().splitlines() if x.startswith("dynamic tree of 4 ")]
    assert line.count("2.50") == 2


def test_beside_a_median_stands_the_standard_error_of_the_rounds() -> None:
    shown = [table.with_spread(summary.Spread.of(times)) for times in ([2.0], [3, 1, 2], [1, 3])]
    assert shown == ["2.00", "2.00 ±0.58", "2.00 ±1.00"]
