"""Run pytest with Triton's interpreter, which is chosen when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pytest_interpreted(
    *arguments: str | Path, interpret: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run pytest with these ``arguments`` in a process of its own, and return the finished process.

    With ``interpret`` off, the kernels run on a GPU.
    """
    path = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def passes_interpreted(file: str, count: int, names: str = "interpreted") -> None:
    """Check that as many tests of a file with these ``names`` pass, and that none is skipped."""
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    done = pytest_interpreted(file, "-k", names)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout
    assert f"{count} passed" in done.stdout, done.stdout
