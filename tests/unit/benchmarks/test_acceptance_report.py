"""The command of the acceptance laboratory, from options to tables, pictures and files."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from acceptance_models import VOCABULARY, in_rows, plain
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import pictures
from benchmarks.acceptance import command, report
from benchmarks.acceptance.paper import REPORTED
from benchmarks.acceptance.plots import draw
from dyntree_plugin.provenance import provenance

REPOSITORY = Path(__file__).parents[3]
PROMPTS = 6

KNOWN = {"beta": 0.5, "bits": 1.0, "second_moment": 2.0}
"""A posterior of which the law is easily told."""

FILES = ("prompts.jsonl", "result.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return target, drafts and a file of prompts, as a user passes them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("acceptance")
    for name, noise in (("target", 0.0), ("draft", 0.2), ("second", 0.4)):
        plain(noise).save_pretrained(root / name)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root / "target")
    lines = [json.dumps({"prompt": f"w{i} w{2 * i} w7"}) for i in range(1, PROMPTS + 1)]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return {name: root / name for name in (*FILES, "target", "draft", "second")}


def invoke(folders: dict[str, Path], *more: str) -> Any:
    named = ["--target", str(folders["target"]), "--draft", str(folders["draft"])]
    prompts = ["--prompts", str(folders["prompts.jsonl"]), "--num-prompts", "4"]
    small = ["--calibration", "2", "--budgets", "8,32", "--max-tokens", "12", "--max-depth", "6"]
    return CliRunner().invoke(command.app, [*named, *prompts, *small, *more])


@pytest.fixture(scope="module")
def result(folders: dict[str, Path]) -> dict[str, Any]:
    done = invoke(
        folders, "--temperatures", "0,0.8", "--thresholds", "0.1", "--output",
        str(folders["result.json"]), "--plots", str(folders["target"] / "plots"),
        "--further-draft", str(folders["second"]),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "over Sequoia" in done.output
    assert "predicted" in done.output
    loaded: dict[str, Any] = json.loads(folders["result.json"].read_text())
    return loaded


def test_pools_are_left_out_without_a_further_draft() -> None:
    """Control: with one they are there."""
    without, every = (command._methods(None, pools=pools) for pools in (False, True))
    assert every == [*command.METHODS.values()]
    assert without == [method for method in every if method.drafts != "all"] != every


def printed(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=160, color_system="standard", force_terminal=True)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_every_method_is_measured_wherever_it_differs(result: dict[str, Any]) -> None:
    cells = {(c["method"], c["temperature"], c["budget"]) for c in result["cells"]}
    greedy = [method for method in command.METHODS.values() if method.greedy]
    assert len(cells) == len(result["cells"]) == 2 * (len(greedy) + len(command.METHODS))
    assert {method for method, t, _ in cells if t > 0} == set(command.METHODS)
    assert ("coupled", 0.0, 8) not in cells
    for cell in result["cells"]:
        assert 1 <= cell["tokens_per_step"] <= 7
        assert cell["nodes_per_step"] <= cell["budget"]
        drafts = 2 if command.METHODS[cell["method"]].drafts == "all" else 1
        assert cell["draft_forwards_per_step"] <= 6 * drafts
        alone = cell["method"] == "look_up" or cell["method"].startswith("ngram")
        assert (cell["draft_forwards_per_step"] == 0) == alone
    assert {c["label"] for c in result["threshold_sweep"]} == {
        "DySpec threshold 0.1",
        "dynamic threshold",
    }


def test_a_result_says_where_it_comes_from(result: dict[str, Any]) -> None:
    # There is none where the sources lie outside of a repository, as those of an sdist.
    assert result["provenance"]["commit"] == provenance()["commit"]
    assert result["provenance"]["packages"]["torch"]
    assert result["settings"]["prompts"] == 4
    assert result["settings"]["max_depth"] == 6
    assert {lesson["temperature"] for lesson in result["learned"]} == {0.0, 0.8}
    assert all(lesson["sequoia_acceptance"] for lesson in result["learned"])
    assert result["step_times"]["target"]["1"] > 0


def test_the_markdown_table_holds_every_figure_and_the_ratios(result: dict[str, Any]) -> None:
    table, caption = report.markdown_table(result).split("\n\n")
    assert "4 prompts × 12 tokens" in caption
    lines = table.splitlines()
    head, rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert len(head) == len(rule) == 1 + 4
    assert all(len(row) == len(head) for row in rows)
    by_label = {row[0]: row[1:] for row in rows}
    for place, column in enumerate(report.places(result)):
        best = report.best_of_ours(result, *column)
        sequoia = report.find(result["cells"], "sequoia", *column)
        assert best is not None
        assert sequoia is not None
        assert by_label["Sequoia"][place] == f"{sequoia['tokens_per_step']:.2f}"
        ratio = best["tokens_per_step"] / sequoia["tokens_per_step"]
        assert by_label["our best / Sequoia"][place] == f"{ratio:.2f}×"
    assert by_label["coupled"][:2] == ["–", "–"]


def test_drawn_trees_stand_beside_block_chains_of_as_many_nodes_at_most(
    result: dict[str, Any],
) -> None:
    _, _, *rows = report.drawn_markdown([result]).splitlines()
    cells = result["cells"]
    trees = [cell for cell in cells if cell["method"] == "traversal"]
    assert len(rows) == len(trees)
    for row, tree in zip(rows, trees, strict=True):
        here, budget = tree["temperature"], tree["budget"]
        chains = [
            cell["expected_tokens_per_step"] for cell in cells
            if (cell["method"], cell["temperature"]) == ("block", here) and cell["budget"] <= budget
        ]  # fmt: skip
        quotient = tree["expected_tokens_per_step"] / max(chains)
        assert row.startswith(f"| {here:g} | {budget} |")
        assert f" {max(chains):.2f} ± " in row
        assert row.split("|")[-2].startswith(f" {quotient:.2f} ± ")


def test_the_error_of_a_ratio_is_that_over_prompts_that_both_have() -> None:
    """Prompts on which both cells are twice as good tell nothing of their ratio."""
    one = {"by_prompt": [[10, 20.0], [10, 40.0], [10, 60.0]]}
    assert report.ratio({"by_prompt": [[10, 40.0], [10, 80.0], [10, 120.0]]}, one) == (2, 0)
    found, error = report.ratio({"by_prompt": [[10, 60.0], [10, 40.0], [10, 20.0]]}, one)
    assert found == 1
    assert error == pytest.approx(2 * (2 * (20 / 120 - 40 / 120) ** 2) ** 0.5)


def test_what_the_posterior_entropy_foretells_stands_beside_what_was_measured(
    result: dict[str, Any],
) -> None:
    assert [found["temperature"] for found in result["posterior"]] == [0.0, 0.8]
    assert all(found["positions"] == 4 * 12 for found in result["posterior"])
    changed = result | {"posterior": [found | KNOWN for found in result["posterior"]]}
    head, _, *rows = report.posterior_markdown(changed).split("\n\n")[0].splitlines()
    assert head == "| " + " | ".join(report.POSTERIOR_COLUMNS) + " |"
    shown = printed(report.posterior_table(changed))
    for row, place in zip(rows, report.places(result), strict=True):
        cell = report.find(result["cells"], "calibrated", *place)
        assert cell is not None
        tokens = cell["tokens_per_step"]
        foretold = math.log2(place[1] * math.log(2)) + 1
        told = [f"{place[0]:g}", "1.00", "0.50", str(place[1]), f"{foretold:.2f}"]
        told += [f"{tokens:.2f}", f"{tokens / foretold:.2f}"]
        assert row == "| " + " | ".join(told) + " |"
        assert all(each in shown for each in told)
    alone = changed | {"cells": [c for c in result["cells"] if c["method"] == "chain"]}
    assert all(row[5:] == ("–", "–") for row in report.posterior_rows(alone))


def test_cells_that_fall_short_are_red(result: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(result))
    for cell in changed["cells"]:
        if cell["ours"]:
            cell["tokens_per_step"] = 100.0
    red = "\x1b[1;31m"
    assert red not in printed(report.ratio_table(changed))
    for cell in changed["cells"]:
        if cell["method"] == "sequoia" and cell["budget"] == 8 and cell["temperature"] > 0:
            cell["tokens_per_step"] = 100.0 / 1.2
    assert printed(report.ratio_table(changed)).count(red) == 1


def test_a_dear_or_half_empty_dynamic_threshold_is_red(result: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(result))
    sweep = changed["threshold_sweep"]
    for cell in sweep:
        cell |= {"nodes_per_step": 0.97 * cell["budget"], "draft_forwards_per_step": 4.0}
    assert "\x1b[1;31m" not in printed(report.threshold_table(changed))
    next(c for c in sweep if c["method"] == "dynamic_threshold")["draft_forwards_per_step"] = 6.1
    assert "\x1b[1;31m" in printed(report.threshold_table(changed))


def test_the_papers_own_losing_case_is_shown(result: dict[str, Any]) -> None:
    ratios = {(told.table, told.temperature): told.over_sequoia for told in REPORTED}
    assert ratios[4, 0.6] < 1 < ratios[4, 0.0]
    shown = printed(report.paper_table(result))
    assert f"{ratios[4, 0.6]:.2f}×" in shown
    assert shown.count("measured here") == 4


def test_pictures_are_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    written = draw(result, tmp_path / "new")
    assert len(written) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--methods", "chain,oak"], "--methods oak"),
        (["--methods", "chain,pool"], "--methods pool needs drafts: give --further-draft"),
        (["--budgets", "0"], "--budgets 0"),
        (["--budgets", "many"], "--budgets many"),
        (["--temperatures", "-1"], "--temperatures -1"),
        (["--num-prompts", "60"], "--num-prompts and --calibration"),
        (["--step-times", "missing.json"], "--step-times missing.json"),
    ],
)
def test_mistakes_are_refused_by_name_before_a_model_is_loaded(
    folders: dict[str, Path],
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("a model was loaded"))
    done = invoke(folders, *arguments)
    assert done.exit_code == 2
    assert told in done.stderr


def test_pictures_that_cannot_be_drawn_are_refused_before_a_model_is_loaded(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("a model was loaded"))
    done = invoke(folders, "--plots", str(tmp_path))
    assert done.exit_code == 2
    assert "--plots needs matplotlib" in done.stderr


def test_one_model_alone_is_refused() -> None:
    done = CliRunner().invoke(command.app, ["--target", "somewhere"])
    assert done.exit_code == 2
    assert "give both or neither" in done.stderr


def test_models_of_different_vocabularies_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = in_rows()
    config = type(model.config)(**(model.config.to_dict() | {"vocab_size": VOCABULARY + 1}))
    type(plain())(config).save_pretrained(tmp_path)
    done = invoke(folders | {"draft": tmp_path})
    assert done.exit_code == 2
    assert f"{VOCABULARY + 1}" in done.stderr


@pytest.mark.parametrize("width", [80, 60])
def test_a_small_terminal_shows_every_figure_of_twelve_cells_whole(width: int) -> None:
    path = REPOSITORY / "benchmarks" / "results" / "acceptance-cpu.json"
    result = json.loads(path.read_text()) | {"posterior": []}
    assert len(report.places(result)) == 12
    console = Console(file=io.StringIO(), width=width)
    report.show(console, result)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    tables = shown.split("Modelled speed-up")[0]
    words = [word for line in tables.splitlines() for word in line.split()]
    for temperature, _ in report.places(result):
        assert words.count(f"T={temperature:g}") == 4 * 4
    for cell in result["cells"]:
        assert f"{cell['tokens_per_step']:.2f}" in words
        assert f"{cell['draft_forwards_per_step']:.1f}" in words


def test_the_page_shows_the_published_result() -> None:
    published = sorted((REPOSITORY / "benchmarks" / "results").glob("acceptance-*.json"))
    if not published:
        pytest.skip("no result is published in benchmarks/results")
    page = (REPOSITORY / "benchmarks" / "results" / "README.md").read_text()
    for path in published:
        assert report.markdown_table(json.loads(path.read_text())) in page, path.name
