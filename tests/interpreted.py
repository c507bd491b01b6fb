"""Run pytest with Triton's interpreter, which is chosen when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
