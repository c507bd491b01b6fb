"""The demonstration on real engines, and the traces that it draws from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

COMPARE = """
import json, sys
from contextlib import contextmanager
from dataclasses import asdict
from dyntree_plugin import openmp, pair
openmp.restart_with_library()

@contextmanager
def announce(what, parts):
    yield lambda: None

if __name__ == "__main__":
    from dyntree_plugin.commands.demo.engines import Settings, compare
    target, draft = map(str, pair.paths().values())
    prompts = pair.held_out_prompts(2)
    whole = {"budget": "fixed"}
    settings = Settings(target, draft, "float32", 16, whole, 0.8, 0.95, 7, 40, prompts)
    c = compare(settings, announce)
    traces = [[asdict(step) for step in steps] for steps in c.traces]
    runs = {"plain": asdict(c.plain), "tree": asdict(c.tree), "traces": traces}
    with open(sys.argv[1], "w") as file:
        json.dump(runs, file)
"""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sampled completions without and with whole trees, and the traces of the latter: no clock
    decides on what is traced and on what is counted before."""
    folder: Path = tmp_path_factory.mktemp("demo")
    (folder / "compare.py").write_text(COMPARE)
    subprocess.run([sys.executable, folder / "compare.py", folder / "result"], check=True)
    result: dict[str, Any] = json.loads((folder / "result").read_text())
    return result


def tokens(run: dict[str, Any]) -> list[list[int]]:
    return [completion["tokens"] for completion in run["completions"]]


def test_sampled_text_is_the_same_on_both_engines(comparison: dict[str, Any]) -> None:
    assert tokens(comparison["plain"]) == tokens(comparison["tree"])
    assert all(tokens(comparison["tree"]))


def test_the_traced_steps_emit_the_completion(comparison: dict[str, Any]) -> None:
    for completion, steps in zip(
        comparison["tree"]["completions"], comparison["traces"], strict=True
    ):
        # The first token comes from the prompt's own forward; the last step may go too far.
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


def test_the_command_completes_draws_and_finds_the_same_text() -> None:
    command = [sys.executable, "-m", "dyntree_plugin.cli", "demo"]
    done = subprocess.run(
        [*command, "--prompts=2", "--max-tokens=48"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The text is the same" in done.stdout
    row = re.search(r"tokens per target step │ +1\.00 │ +([\d.]+)", done.stdout)
    assert row is not None, done.stdout
    assert float(row[1]) > 1.5
    assert "✓" in done.stdout.split("One step:")[1].split("This step emitted")[0]
    assert "\x1b" not in done.stdout
    # vLLM's own messages stay away.
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
