"""Run every example, and the README's, on real engines."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import answered
from test_readme import blocks

from dyntree_plugin import pair
from dyntree_plugin.commands.doctor.command_line import command_line_checks
from dyntree_plugin.commands.show.generation import load

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {name: str(path) for name, path in pair.paths().items()}

# This runs several examples in one process; those with equal arguments share an engine.
DRIVER = """
import contextlib, io, json, os, runpy, sys
from pathlib import Path
import vllm

stock, engines, printed = vllm.LLM, {}, {}

def shared(model, **arguments):
    asked = (model, arguments["speculative_config"], arguments["additional_config"])
    key = json.dumps(asked, sort_keys=True)
    if key not in engines:
        engines[key] = stock(model, **arguments | {"disable_log_stats": False})
    return engines[key]

if __name__ == "__main__":
    given, results = map(Path, sys.argv[1:])
    asked = json.loads(given.read_text())["engine"]
    os.chdir(asked["folder"])
    vllm.LLM = shared
    for path, *arguments in asked["runs"]:
        sys.argv = [path, *arguments]
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            runpy.run_path(path, run_name="__main__")
        printed[path] = stream.getvalue()
    results.write_text(json.dumps(printed))
"""
DRIVEN = {
    "offline.py": ["--max-tokens", "16"],
    "metrics.py": ["--num-prompts", "3", "--max-tokens", "24"],
    "draw_trees.py": ["--max-tokens", "24", "--output", "trees"],
    "own_pair.py": [
        *("--target", MODELS["target"], "--draft", MODELS["draft"]),
        *("--dtype=float32", "--max-tokens=24"),
    ],
}
TESTED = {*DRIVEN, "streaming_client.py"}


def run(command: list[str], cwd: Path) -> str:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("examples")
    return made


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """Return the output of the examples that can share an engine."""
    runs = [[str(EXAMPLES / name), *arguments] for name, arguments in DRIVEN.items()]
    (snippet,) = blocks("python")
    (folder / "readme.py").write_text(snippet)
    runs.append([str(folder / "readme.py")])
    (folder / "driver.py").write_text(DRIVER)
    driver, asked = folder / "driver.py", {"runs": runs, "folder": str(folder)}
    found: dict[str, str] = answered(str(driver), asked, {}, threads=1)
    return {Path(path).name: text for path, text in found.items()}


def test_every_example_is_run_here_and_listed_in_the_readme() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TESTED
    listed = re.findall(r"^\| \[`(\w+\.py)`\]", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(TESTED)


def completes(shown: str) -> bool:
    prompts = runpy.run_path(str(EXAMPLES / "offline.py"))["PROMPTS"]
    return all(re.search(re.escape(prompt) + r"[^\n]*\S", shown) for prompt in prompts)


def test_offline_completes_its_prompts(printed: dict[str, str]) -> None:
    assert completes(printed["offline.py"]), printed["offline.py"]


def test_the_readmes_snippet_completes_its_prompt(printed: dict[str, str]) -> None:
    assert printed["readme.py"].strip()


@pytest.mark.slow
def test_so_it_does_with_an_engine_in_another_process(folder: Path) -> None:
    shown = run([sys.executable, str(EXAMPLES / "offline.py"), "--max-tokens", "16"], folder)
    assert completes(shown), shown


def test_metrics_tells_tokens_per_step_and_acceptance_by_depth(printed: dict[str, str]) -> None:
    shown = printed["metrics.py"]
    per_step = re.search(r"([\d.]+) tokens per step", shown)
    assert per_step is not None
    assert 1 < float(per_step[1]) <= 17
    depths = [int(share) for share in re.findall(r"at depth \d: +(\d+)%", shown)]
    assert len(depths) == 8
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 0


def test_draw_trees_writes_what_it_prints(printed: dict[str, str], folder: Path) -> None:
    generation = load(folder / "trees" / "trees.json")
    steps = len(generation.steps)
    assert steps > 0
    assert len(printed["draw_trees.py"].splitlines()) == steps
    assert "<svg" in (folder / "trees" / "trees.html").read_text()


def test_own_pair_tells_the_acceptance_of_a_pair(printed: dict[str, str]) -> None:
    found = re.findall(r"temperature ([\d.]+): ([\d.]+) of at most 16", printed["own_pair.py"])
    assert [temperature for temperature, _ in found] == ["0.0", "1.0"]
    assert all(0 < float(accepted) <= 16 for _, accepted in found)


def test_own_pair_refuses_another_vocabulary_before_any_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    def no_engine(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(vllm, "LLM", no_engine)
    other = tmp_path / "draft"
    shutil.copytree(MODELS["draft"], other, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    main = runpy.run_path(str(EXAMPLES / "own_pair.py"))["main"]
    with pytest.raises(SystemExit, match="2 tokens differ"):
        main(["--target", MODELS["target"], "--draft", str(other)])
    with pytest.raises(AssertionError, match="an engine was started"):
        main(["--target", MODELS["target"], "--draft", MODELS["draft"]])


def test_the_client_streams_steps(server: str, folder: Path) -> None:
    client = [sys.executable, str(EXAMPLES / "streaming_client.py"), "--base-url", f"{server}/v1"]
    shown = run([*client, "--max-tokens", "32"], folder)
    counts = re.search(r"(\d+) tokens in (\d+) pieces", shown)
    assert counts is not None, shown
    tokens, pieces = map(int, counts.groups())
    assert tokens == 32
    # If the server's process gets no time, vLLM joins the outputs of several steps, or of all.
    assert 0 < pieces < tokens


@pytest.mark.usefixtures("environment")
def test_the_servers_command_line_in_the_client_is_one_that_is_served() -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / "streaming_client.py").read_text()))
    assert text is not None
    (line,) = re.findall(r"dyntree serve (.*?)\n *python", text, re.S)
    line = line.replace("TARGET", MODELS["target"]).replace("DRAFT", MODELS["draft"])
    checks, config = command_line_checks(shlex.split(line.replace("\\\n", " ")))
    assert config is not None, checks
    assert checks[0].found.startswith("admitted")
