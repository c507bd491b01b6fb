"""What a result file says of its command."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from dyntree_plugin import provenance as module_of
from dyntree_plugin.provenance import provenance


@pytest.mark.parametrize(
    ("module", "command"),
    [("benchmarks.serve.__main__", "python -m benchmarks.serve"), (None, "dyntree")],
)
def test_a_command_can_be_repeated(
    module: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = module and SimpleNamespace(name=module)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["/bin/dyntree", "--rounds", "3"])
    assert provenance()["command"] == f"{command} --rounds 3"


def test_a_commit_is_that_of_the_repository_that_holds_this_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: once the file is tracked there, it is."""
    installed = tmp_path / "provenance.py"
    installed.write_text("")
    run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    identity = ["-c", "user.name=u", "-c", "user.email=u@example.com"]
    run(["git", "init"])
    run(["git", *identity, "commit", "--allow-empty", "-m", "a user's own"])
    monkeypatch.setattr(module_of, "__file__", str(installed))
    monkeypatch.setenv("DYNTREE_COMMIT", "of the package")
    assert provenance()["commit"] == "of the package"
    run(["git", "add", "provenance.py"])
    assert len(provenance()["commit"]) == 40
