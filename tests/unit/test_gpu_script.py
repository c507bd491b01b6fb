"""`make gpu-e2e` says what it needs before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_e2e.sh"


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHON": sys.executable, "OUT": str(folder / "out"), "MODELS": str(folder / "models")}
    return subprocess.run(
        [str(SCRIPT)], env={**os.environ, **own, **variables}, capture_output=True, text=True
    )


@pytest.mark.parametrize("part", ["", "all", "speed"])
def test_a_part_that_there_is_not_is_refused_with_those_there_are(
    part: str, tmp_path: Path
) -> None:
    done = run(tmp_path, PART=part)
    assert done.returncode == 2
    assert (
        f"PART=identity, PART=launches, PART=speed-1b or PART=speed-8b; it was '{part}'"
        in done.stderr
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, PART="speed-1b")
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"MODELS": "/given", "XDG_CACHE_HOME": "/cache"}, "given"),
        ({"MODELS": "", "XDG_CACHE_HOME": "/cache"}, "cache"),
        ({"MODELS": "", "XDG_CACHE_HOME": ""}, "home/.cache"),
    ],
)
def test_what_is_kept_lies_in_the_users_cache_unless_a_folder_is_given(
    variables: dict[str, str], kept: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf %s "$XDG_CACHE_HOME" >"$(dirname "$0")/found"\nexit 1\n')
    python.chmod(0o755)
    inside = {name: value and f"{tmp_path}{value}" for name, value in variables.items()}
    run(tmp_path, PART="launches", PYTHON=str(python), HOME=f"{tmp_path}/home", **inside)
    assert (tmp_path / "found").read_text() == f"{tmp_path}/{kept}"
