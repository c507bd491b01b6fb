"""The report of a result of `dyntree bench serve`, and its agreement with published results."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.serve import plots, speed_up
from dyntree_plugin.commands.bench import overview, summary, table, terminal
from dyntree_plugin.commands.bench.chains import serves
from dyntree_plugin.commands.bench.results import Cell, Result, Series, read
from dyntree_plugin.commands.loads.runs import Engine, Run, Speculation

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "benchmarks" / "results").glob("serve-*.json"))
CELL = Cell(prompts="code", temperature=0.0, batch=1)
DRAWN = {"draft_sample_method": "probabilistic"}


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


def test_tokens_per_step_are_one_and_the_accepted() -> None:
    rows = by_engine(result())
    assert rows["chain of 4"].tokens_per_step == pytest.approx(3.0)
    assert rows["no speculation"].tokens_per_step == 1.0


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


MANY = ENGINES | {
    "probabilistic chain of 12": ("chain", 12, [9.0, 18.0, 14.0], 30),
    "dynamic tree of 16, budget fixed": ("dynamic tree", 16, [123.456, 333.3, 222.2], 30),
}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_word_of_the_tables_is_broken(width: int) -> None:
    lines = shown(result((CELL, CELL.model_copy(update={"temperature": 1.0})), **MANY), width)
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    wanted = {word for name in MANY for word in name.split()}
    wanted |= {"speed-up", "best", "chain", "/token"} | ({"/step", "/s"} if width >= 80 else set())
    assert wanted <= words
    assert not any("…" in line for line in lines)
    # The range of a ratio is given up before a figure is.
    ranges = [line for line in lines if line.startswith("chain of 4") and "±" in line]
    assert bool(ranges) == (width >= 80)


def test_the_tables_name_the_best_chain_and_compare_tokens_with_the_first_engine() -> None:
    differing = result()
    (*others, last) = differing.series
    last = last.model_copy(update={"differing_requests": 1, "differing_tokens": 7})
    texts = last.model_copy(update={"differing_requests": 2, "differing_tokens": None})
    for series, said in (
        (differing.series, "All answers are those of no speculation."),
        ([*others, last], "than those of no speculation: dynamic tree of 64 in 7 of 100."),
        ([*others, texts], "than those of no speculation: dynamic tree of 64 in 2 texts."),
    ):
        lines = shown(differing.model_copy(update={"series": series}), 120)
        assert any(said in line for line in lines)
        assert any(line.startswith("The best chain here is the chain of 4") for line in lines)


def test_the_markdown_table_has_every_engine_and_says_which_loses() -> None:
    text = table.markdown_table(result((CELL, CELL.model_copy(update={"batch": 8}))))
    assert text.count("dynamic tree of 64 |") == 2
    assert text.count("(loses)") == 4
    assert "batch 8" in text
    assert "- a note" in text


def test_it_is_said_when_the_best_chain_is_the_longest_of_its_kind() -> None:
    longest = "The best chain here is the chain of 4, the longest of its kind: a longer one may"
    assert longest in table.markdown_table(result())
    longer = ENGINES | {"chain of 8": ("chain", 8, [30.0, 60.0, 45.0], 20)}
    assert "The best chain here is the chain of 4." in table.markdown_table(result(**longer))
    of_another_kind = result(
        **ENGINES | {"probabilistic chain of 8": ("chain", 8, [30.0, 60.0, 45.0], 20)}
    )
    engines = [
        each.model_copy(update={"arguments": {"speculative_config": {**DRAWN}}})
        if each.name.startswith("prob") else each
        for each in of_another_kind.engines
    ]  # fmt: skip
    assert longest in table.markdown_table(of_another_kind.model_copy(update={"engines": engines}))


def test_of_servers_the_first_is_what_the_others_are_compared_with() -> None:
    servers = {"a": ("server", 0, [20.0], 0), "b": ("server", 0, [10.0], 5)}
    text = table.markdown_table(result(**servers))
    assert "× a" in text
    assert re.search(r"\| b \|.* 2\.00 \|", text)
    # In the terminal a column that nothing is known for is left out.
    printed = " ".join(" ".join(shown(result(**servers), 80)).split())
    assert "speed-up" in printed
    assert "× best chain" not in printed.partition("tokens/step: of")[0]


def test_pictures_are_drawn_of_what_the_result_has(tmp_path: Path) -> None:
    cells = (CELL, CELL.model_copy(update={"batch": 4}), CELL.model_copy(update={"prompts": "x"}))
    written = plots.draw(result(cells), tmp_path)
    assert [path.stem for path in written] == [
        "speed_up", "tokens_per_step_over_budget", "time_per_stage",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert not plots.draw(result(a=("server", 0, [20.0], 0)), tmp_path / "s")[1:]


def test_stages_in_the_picture_add_up_to_the_step() -> None:
    figure = plots.time_per_stage(result())
    ends = {
        round(bar.get_x() + bar.get_width(), 6)
        for container in figure.axes[0].containers[-1:]
        for bar in container
    }
    assert ends == {12.0}
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["no speculation", "chain of 4", "dynamic tree of 4", "dynamic tree of 64"]


def test_of_many_engines_the_bars_of_the_best_are_drawn() -> None:
    chosen = plots.chosen(result(**MANY), CELL)
    assert [row.series.engine for row in chosen] == [
        "no speculation", "dynamic tree of 4", "dynamic tree of 64", "probabilistic chain of 12",
    ]  # fmt: skip


def texts(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_the_picture_labels_the_best_chain_and_tree_with_their_ratios() -> None:
    batches = tuple(CELL.model_copy(update={"batch": batch}) for batch in (1, 8))
    (one, eight) = speed_up.figure(result(batches)).axes
    assert "batch 8" in eight.get_title(loc="left")
    assert "best chain 2.00×" in texts(one)
    assert "best tree 2.50×\n1.25 × best chain" in texts(one)
    # The lengths of chains are in their dots, and a line stands at 1 and at the best chain.
    assert {"1", "4"} <= {*texts(one)}
    assert {2.0, 1.0} <= {float(line.get_xdata()[0]) for line in one.lines}


def test_an_engine_that_serves_no_load_of_a_row_has_no_band_there() -> None:
    warm = CELL.model_copy(update={"temperature": 1.0})
    found = result((CELL, warm))
    served = [s for s in found.series if s.cell == CELL or s.engine != "dynamic tree of 64"]
    cold, hot = speed_up.figure(found.model_copy(update={"series": served})).axes
    bands = [[label.get_text() for label in axis.get_yticklabels()] for axis in (cold, hot)]
    assert bands[0] == ["no speculation", "chain of …", "dynamic tree of 4", "dynamic tree of 64"]
    assert bands[1] == bands[0][:-1]


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    from dyntree_plugin.commands.bench.results import write

    write(result(), tmp_path / "deep" / "r.json")
    assert read(tmp_path / "deep" / "r.json") == result()
    (tmp_path / "other.json").write_text('{"provenance": {}}')
    with pytest.raises(ValueError, match="settings"):
        read(tmp_path / "other.json")


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_page_of_tables_has_every_published_result(path: Path) -> None:
    page = path.with_name("README.md").read_text()
    assert path.name in page
    assert table.markdown_table(read(path)).strip() in page


@pytest.mark.parametrize("name", ["serve-llama-1b", "serve-llama-1b-without-amx"])
def test_the_page_and_the_readme_say_by_which_measure_the_tree_is_how_fast(name: str) -> None:
    found = read(ROOT / "benchmarks" / "results" / f"{name}.json")
    count = {7: "seven", 11: "eleven"}[sum(each.kind == "chain" for each in found.engines)]
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


def test_the_pages_show_the_cells_in_which_speculation_loses() -> None:
    found = read(ROOT / "benchmarks" / "results" / "serve-llama-1b-without-amx.json")
    said = (ROOT / "README.md").read_text()
    (cell,) = (c for c in found.cells() if (c.temperature, c.batch) == (0, 4))
    rows = {row.series.engine: row.tokens_per_second.median for row in summary.rows(found, cell)}
    tree, chain = rows["dynamic tree of 16"], rows["chain of 2"]
    assert tree < chain
    assert f"tree of 16: {tree:.1f} tokens/s; vLLM's chain of 2: {chain:.1f}" in said
    said = " ".join((ROOT / "docs" / "results.md").read_text().split())
    (cell,) = (c for c in found.cells() if (c.temperature, c.batch) == (1, 4))
    over = {row.series.engine: row.over_first.median for row in summary.rows(found, cell)}
    chains = [ratio for name, ratio in over.items() if name.startswith("chain")]
    assert f"run at {min(chains):.2f} to {max(chains):.2f} times the speed without" in said
    drawn, tree = over["probabilistic chain of 2"], over["dynamic tree of 16"]
    assert f"runs at {drawn:.2f} times that speed, and the tree of 16 at {tree:.2f}" in said


def test_the_readme_shows_the_cell_with_amx_in_which_the_tree_loses() -> None:
    found = read(ROOT / "benchmarks" / "results" / "serve-llama-1b.json")
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
