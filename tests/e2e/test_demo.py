"""The demonstration on real engines, and the traces that it draws from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

COMMAND = [
    "demo",
    "--num-prompts=2",
    "--max-tokens=48",
    "--temperature=0.8",
    "--top-p=0.95",
    "--seed=7",
]
WHOLE = ["--dtype=float32", '--dyntree={"budget": "fixed", "calibration": "off"}']
"""Arguments for whole trees without learning, so that traces and counters agree."""
NOTING = """
import json, sys
from dataclasses import asdict
from dyntree_plugin.cli import main
from dyntree_plugin.commands.demo import command as demo

stock, file = demo.compare, sys.argv.pop(1)

def compare(settings, announce):
    found = stock(settings, announce)
    traces = [[asdict(step) for step in steps] for steps in found.traces]
    runs = {"plain": asdict(found.plain), "tree": asdict(found.tree), "traces": traces}
    with open(file, "w") as written:
        json.dump(runs, written)
    return found

if __name__ == "__main__":
    demo.compare = compare
    main()
"""
"""The program `dyntree`, which also saves the completions that it compares."""


@dataclass(frozen=True)
class Demonstration:
    """``compared`` holds the completions without and with trees, and the traces of the latter."""

    process: subprocess.CompletedProcess[str]
    compared: dict[str, Any]


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> Demonstration:
    folder: Path = tmp_path_factory.mktemp("demo")
    (folder / "noting.py").write_text(NOTING)
    line = [sys.executable, str(folder / "noting.py"), str(folder / "result"), *COMMAND, *WHOLE]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Demonstration(done, json.loads((folder / "result").read_text()))


@pytest.fixture(scope="module")
def comparison(demonstration: Demonstration) -> dict[str, Any]:
    return demonstration.compared


def tokens(run: dict[str, Any]) -> list[list[int]]:
    return [completion["tokens"] for completion in run["completions"]]


def test_sampled_text_is_the_same_on_both_engines(comparison: dict[str, Any]) -> None:
    assert tokens(comparison["plain"]) == tokens(comparison["tree"])
    assert all(tokens(comparison["tree"]))


def test_the_traced_steps_emit_the_completion(comparison: dict[str, Any]) -> None:
    for completion, steps in zip(
        comparison["tree"]["completions"], comparison["traces"], strict=True
    ):
        # The prompt's forward gives the first token; the last step may go beyond the end.
        emitted = [token for step in steps for token in step["emitted"]]
        wanted = completion["tokens"][1:]
        assert emitted[: len(wanted)] == wanted
        text = completion["prompt_tokens"] + completion["tokens"]
        for step in steps:
            assert step["root_token"] == text[step["context_length"] - 1]


def test_the_trees_branch_and_their_values_fall_along_every_path(
    comparison: dict[str, Any],
) -> None:
    steps = [step for steps in comparison["traces"] for step in steps]
    assert any(len(set(step["parents"])) < len(step["parents"]) for step in steps)
    for step in steps:
        for value, parent in zip(step["values"], step["parents"], strict=True):
            assert value <= (step["values"][parent] if parent >= 0 else 1e-6)


def test_the_steps_that_are_counted_are_those_that_are_traced(comparison: dict[str, Any]) -> None:
    assert comparison["tree"]["steps"] == sum(map(len, comparison["traces"]))


def test_every_stage_takes_time_and_all_of_them_no_more_than_the_run(
    comparison: dict[str, Any],
) -> None:
    stages = comparison["tree"]["stages"]
    assert all(seconds > 0 for seconds in stages.values())
    assert {"target", "draft"} <= stages.keys()
    assert sum(stages.values()) < comparison["tree"]["seconds"]


def test_the_command_completes_draws_and_finds_the_same_text(demonstration: Demonstration) -> None:
    done = demonstration.process
    assert "The text is the same" in done.stdout
    row = re.search(r"tokens per target step │ +1\.00 │ +([\d.]+)", done.stdout)
    assert row is not None, done.stdout
    assert float(row[1]) > 1.5
    assert "✓" in done.stdout.split("One step:")[1].split("This step emitted")[0]
    assert "\x1b" not in done.stdout
    # vLLM's own messages are not shown.
    assert "INFO" not in done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


def test_models_that_do_not_fit_end_with_status_2_before_any_engine_starts(
    model_folder: Callable[..., str],
) -> None:
    length = {"max_position_embeddings": 2048}
    target = model_folder("target", **length)
    draft = model_folder("draft", vocab_size=256, **length)
    done = subprocess.run(
        [sys.executable, "-m", "dyntree_plugin.cli", "demo", "--target", target, "--draft", draft],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "vocab_size" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Starting the target" not in done.stdout
