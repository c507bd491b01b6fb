"""`dyntree tune` on real engines: what a kill leaves is enough to end at the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.pair.corpus import training_sources
from dyntree_plugin import pair
from dyntree_plugin.commands.bench.results import Series, read

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TARGET, DRAFT = pair.target_and_draft()
LIMIT = 600.0
"""Seconds that a stage may take; it tells a hanging run from a slow one."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the first lines of library modules."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [source.text[:200] for source in training_sources() if len(source.text) > 1000][:150]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


def command(prompts: Path, output: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "dyntree_plugin.cli", "tune", "--target", TARGET, *more),
        *("--prompts", str(prompts), "--output", str(output), "--dtype", "float32"),
        *("--max-tokens", "16", "--held-out", "8", "--temperature", "0", "--temperature", "1"),
        *("--nodes", "8", "--epochs", "2"),
    ]


def finished(words: list[str]) -> str:
    """Run a command to its end; return what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * LIMIT)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def killed(words: list[str], once: Path) -> None:
    """Run a command, and kill it as soon as a file or a folder is there."""
    assert not once.exists()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + LIMIT
    while not once.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert once.exists()


def benched(prompts: Path, draft: Path) -> list[Series]:
    """Let vLLM serve the target alone, with a draft's chain and with its trees; return the runs."""
    result = draft / "bench.json"
    tree = '{"node_budget": 8, "budget": "fixed", "lookup": "off"}'
    finished([
        *(sys.executable, "-m", "dyntree_plugin.cli", "bench", "serve", "--target", TARGET),
        *("--draft", str(draft), "--chain", "3", "--dyntree", tree),
        *("--engine-arguments", '{"dtype": "float32", "enforce_eager": true}'),
        *("--prompts", str(prompts), "--num-prompts", "4", "--max-tokens", "32", "--batch", "4"),
        *("--temperature", "0", "--rounds", "1", "--output", str(result)),
    ])  # fmt: skip
    return read(result).series


@pytest.fixture(scope="module")
def whole(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nothing has stopped."""
    output = tmp_path_factory.mktemp("whole")
    finished(command(prompts, output, "--draft", DRAFT))
    return output


def test_a_run_that_is_killed_in_each_stage_ends_at_the_same_weights(
    whole: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "killed"
    words = command(prompts, output, "--draft", DRAFT)
    work = output / "tune"
    for left in ("written/00000.json", "taught/00000.safetensors", "checkpoint.pt", "fitted"):
        killed(words, work / left)
        assert not (output / "config.json").exists()
    assert "continuing the run" in finished(words)
    ours, theirs = (
        load_file(folder / "tune" / "fitted" / "model.safetensors") for folder in (output, whole)
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    # Control: the weights are others than those that the run began with.
    before = load_file(Path(DRAFT) / "model.safetensors")
    assert not all(ours[name].equal(before[name]) for name in ours)


def test_the_result_is_judged_by_trees_on_texts_that_were_held_out(whole: Path) -> None:
    report = json.loads((whole / "tune" / "report.json").read_text())
    places = {(cell["drafts"], cell["temperature"], cell["nodes"]) for cell in report["cells"]}
    assert places == {(name, t, 8) for name in ("before", "after") for t in (0.0, 1.0)}
    assert all(1 < cell["tokens_per_step"] <= 9 for cell in report["cells"])
    assert (whole / "tune" / "curve.png").stat().st_size > 5000
    # The result lies where it belongs if it is better, and only then.
    assert (whole / "model.safetensors").exists() is (report["gain"] > 1)
    files = {path.name for path in (whole / "tune" / "fitted").iterdir()}
    assert {path.name for path in Path(DRAFT).iterdir()} <= files


def test_new_drafts_and_merged_adapters_are_made_and_served(prompts: Path, tmp_path: Path) -> None:
    head, merged, model = tmp_path / "head", tmp_path / "merged", tmp_path / "model"
    said = finished(command(prompts, head, "--head", "eagle3", "--head-vocabulary", "512"))
    assert '"method": "eagle3"' in said
    finished(command(prompts, merged, "--draft", DRAFT, "--adapter", "4"))
    assert '"method": "draft_model"' in finished(command(prompts, model, "--draft-layers", "2"))
    for folder in (head, merged, model):
        report = json.loads((folder / "tune" / "report.json").read_text())
        assert all(cell["tokens_per_step"] > 1 for cell in report["cells"])
    plain, *drafting = benched(prompts, model)
    assert len(drafting) == 2
    for one in drafting:
        assert one.differing_tokens == 0
        assert one.runs[0].request_steps < plain.runs[0].request_steps
    made = load_file(merged / "tune" / "fitted" / "model.safetensors")
    assert made.keys() == load_file(Path(DRAFT) / "model.safetensors").keys()
