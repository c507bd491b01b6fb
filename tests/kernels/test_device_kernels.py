"""Runs the checks of the Triton kernels: on the GPU if there is one, else in the interpreter.

Each file of checks has a process of its own, because the interpreter is chosen when triton is
imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEVICE = Path(__file__).parent / "device"
ROOT = DEVICE.parents[2]
NO_TESTS = 5  # pytest's exit status where a whole file is skipped


@pytest.mark.parametrize("checks", sorted(path.stem for path in DEVICE.glob("check_*.py")))
def test_checks_pass(checks: str) -> None:
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    path = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment.pop("TRITON_INTERPRET", None)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, DEVICE / f"{checks}.py"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    if done.returncode == NO_TESTS and "SKIPPED" in done.stdout:
        pytest.skip(done.stdout.partition("SKIPPED")[2].splitlines()[0])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
