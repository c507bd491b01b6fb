"""`make test` runs every group of tests, whatever fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUPS = ("ruff check", "mypy", "pytest -m not e2e", "pytest -m (e2e or gpu", "pytest -m quiet")

PROGRAM = """#!/bin/bash
asked="$(basename "$0") $*"
echo "$asked" >>calls
[[ "$asked" != "$(cat failing)"* ]]
"""


def make_test(folder: Path, failing: str) -> tuple[int, list[str]]:
    """Return the status of `make test`, and the programs that it called.

    The call that begins with ``failing`` fails.
    """
    shutil.copy(ROOT / "Makefile", folder)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("ruff", "mypy", "pytest"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    (folder / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/install.sh", ".venv/installed"):
        (folder / name).touch()
    (folder / "failing").write_text(failing)
    done = subprocess.run(["make", "test"], cwd=folder, capture_output=True, text=True)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("failing", GROUPS)
def test_a_group_that_fails_hides_no_other_and_fails_the_whole(
    failing: str, tmp_path: Path
) -> None:
    status, calls = make_test(tmp_path, failing)
    assert status != 0
    for group in set(GROUPS) - {"mypy"}:
        assert any(call.startswith(group) for call in calls), calls


def test_nothing_fails_where_all_groups_pass(tmp_path: Path) -> None:
    status, calls = make_test(tmp_path, "no program of this name")
    assert status == 0
    assert all(any(call.startswith(group) for call in calls) for group in GROUPS)
