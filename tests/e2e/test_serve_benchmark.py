"""Run `dyntree bench serve` as a user does, with the embedded pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dyntree_plugin.commands.bench.results import Result, read
from dyntree_plugin.commands.bench.summary import tokens_per_step

pytestmark = pytest.mark.e2e

CODE = "held-out code"
TREE = "dynamic tree of 8, budget fixed"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder with the command's files, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "grammars.jsonl"
    known = {"type": "object", "properties": {"known": {"type": "boolean"}}, "required": ["known"]}
    line = {"prompt": "found = ", "sampling": {"structured_outputs": {"json": known}}}
    prompts.write_text(f"{json.dumps(line)}\n" * 2)
    command = [
        *(sys.executable, "-m", "benchmarks.serve"),
        *("--engine-arguments", '{"dtype": "float32"}'),
        *("--prompts", "code", "--prompts", str(prompts)),
        *("--num-prompts", "2", "--max-tokens", "24"),
        *("--batch", "1", "--batch", "2"),
        *("--chain", "2", "--rounds", "2"),
        *("--dyntree", '{"node_budget": 8, "budget": "fixed"}'),
        *("--side-by-side", "3", "--temperature", "0"),
        *("--time-limit", "400", "--note", "A note."),
        *("--output", str(folder / "result.json")),
    ]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return folder, done.stdout


@pytest.fixture(scope="module")
def result(measured: tuple[Path, str]) -> Result:
    return read(measured[0] / "result.json")


@pytest.mark.slow
def test_every_engine_is_measured_in_every_round_and_gives_the_same_text(result: Result) -> None:
    names = ["no speculation", "chain of 2", TREE]
    assert [engine.name for engine in result.engines] == names
    for cell in result.cells():
        for series in result.of(cell).values():
            assert [run.round for run in series.runs] == [0, 1]
            assert series.differing_tokens == 0
            if cell.prompts == CODE:
                assert all(run.output_tokens == 48 for run in series.runs)
                assert series.compared_tokens == 48


@pytest.mark.slow
def test_what_is_counted_of_answers_under_grammars_is_their_tokens(result: Result) -> None:
    cells = [cell for cell in result.cells() if cell.prompts != CODE]
    assert {cell.prompts for cell in cells} == {"grammars"}
    for cell in cells:
        tokens = {run.output_tokens for s in result.of(cell).values() for run in s.runs}
        assert len(tokens) == 1
        plain, _, tree = result.of(cell).values()
        assert tokens_per_step(plain) == 1
        for run in tree.runs:
            assert run.fallbacks.request_steps == run.request_steps
            assert sum(run.fallbacks.by_reason.values()) <= run.request_steps


@pytest.mark.slow
def test_steps_tokens_and_stages_are_those_of_each_engine(result: Result) -> None:
    for cell in (cell for cell in result.cells() if cell.prompts == CODE):
        plain, chain, tree = result.of(cell).values()
        for run in plain.runs:
            assert run.speculation.drafts == 0
            assert run.steps == 2 * 23 / cell.batch
            assert 0 < run.stages_ms["target"] < run.step_ms
        for series, most in ((chain, 2), (tree, 8)):
            for run in series.runs:
                drafts = run.speculation
                # A step for a request's last token has no tree.
                assert drafts.accepted_tokens + drafts.drafts >= 2 * 22
                if series is not chain:  # vLLM's own count includes nodes after the end.
                    assert drafts.accepted_tokens + drafts.drafts <= 2 * 23
                assert 0 < drafts.accepted_tokens < drafts.draft_tokens <= most * drafts.drafts
                assert run.steps < plain.runs[0].steps
                spent = run.stages_ms
                assert spent["target"] > 0
                assert spent["draft"] > 0
                assert sum(spent.values()) < run.step_ms


@pytest.mark.slow
def test_the_tables_are_there(measured: tuple[Path, str]) -> None:
    _, printed = measured
    # The name is in a table per cell, in the table of each run, and in the overview.
    assert printed.count(TREE) >= 4 + 8 + 1
    assert "A note." in printed
    assert printed.count("The best chain here is the chain of 2") == 4
    assert "All answers are those of no speculation." in printed


@pytest.mark.slow
def test_look_up_alone_is_measured_where_prompts_compete_for_room(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [
        *(sys.executable, "-m", "dyntree_plugin.cli", "bench", "serve", "--method", "ngram"),
        *("--chain", "4", "--num-prompts", "4", "--max-tokens", "16", "--output", str(path)),
        *("--batch", "4", "--temperature", "1", "--rounds", "1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    of = {series.engine: series.runs[0] for series in read(path).series}
    assert [*of] == ["no speculation", "n-gram of 4", "look-up tree of 16"]
    assert {run.output_tokens for run in of.values()} == {4 * 16}
    assert of["no speculation"].speculation.drafts == 0
    assert of["n-gram of 4"].speculation.draft_tokens > 0
    assert of["look-up tree of 16"].fallbacks.request_steps > 0
