"""The command of the acceptance laboratory, from options to tables and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from acceptance_models import VOCABULARY, plain
from typer.testing import CliRunner

from benchmarks.acceptance import command, report
from dyntree_plugin.provenance import provenance

REPOSITORY = Path(__file__).parents[3]
PROMPTS = 6


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
        folders, "--temperatures", "0,0.8", "--output", str(folders["result.json"]),
        "--further-draft", str(folders["second"]),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    loaded: dict[str, Any] = json.loads(folders["result.json"].read_text())
    assert report.markdown_table(loaded) in done.output
    assert report.posterior_markdown(loaded) in done.output
    for cell in loaded["cells"]:
        assert f"{cell['draft_forwards_per_step']:.1f} " in done.output
    return loaded


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


def test_a_result_says_where_it_comes_from(result: dict[str, Any]) -> None:
    # There is none where the sources lie outside of a repository, as those of an sdist.
    assert result["provenance"]["commit"] == provenance()["commit"]
    assert result["provenance"]["packages"]["torch"]
    assert result["settings"]["prompts"] == 4
    assert result["settings"]["max_depth"] == 6
    assert {lesson["temperature"] for lesson in result["learned"]} == {0.0, 0.8}
    assert all(lesson["sequoia_acceptance"] for lesson in result["learned"])


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


def test_the_error_of_a_ratio_is_that_over_prompts_that_both_have() -> None:
    """Prompts on which both cells are twice as good tell nothing of their ratio."""
    one = {"by_prompt": [[10, 20.0], [10, 40.0], [10, 60.0]]}
    assert report.ratio({"by_prompt": [[10, 40.0], [10, 80.0], [10, 120.0]]}, one) == (2, 0)
    found, error = report.ratio({"by_prompt": [[10, 60.0], [10, 40.0], [10, 20.0]]}, one)
    assert found == 1
    assert error == pytest.approx(2 * (2 * (20 / 120 - 40 / 120) ** 2) ** 0.5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--methods", "chain,oak"], "--methods oak"),
        (["--methods", "chain,pool"], "--methods pool needs drafts: give --further-draft"),
        (["--budgets", "many"], "--budgets many"),
        (["--num-prompts", "60"], "--num-prompts and --calibration"),
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


def test_the_page_shows_the_published_result() -> None:
    published = sorted((REPOSITORY / "benchmarks" / "results").glob("acceptance-*.json"))
    if not published:
        pytest.skip("no result is published in benchmarks/results")
    page = (REPOSITORY / "benchmarks" / "results" / "README.md").read_text()
    for path in published:
        assert report.markdown_table(json.loads(path.read_text())) in page, path.name
