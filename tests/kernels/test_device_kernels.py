"""Run the checks of the Triton kernels: on the GPU if there is one, else in the interpreter.

Each file of checks has a process of its own, because the interpreter is chosen when triton is
imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import pytest_interpreted

DEVICE = Path(__file__).parent / "device"
CHECKS = sorted(path.stem for path in DEVICE.glob("check_*.py"))
SLOW = {"check_grafts", "check_growth_cases", "check_learn"}
"""A minute and more of the interpreter. The drafting and the steps that others run include them."""
NO_TESTS = 5  # pytest's exit status if a whole file is skipped


@pytest.mark.parametrize(
    "checks",
    [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in CHECKS],
)
def test_checks_pass(checks: str) -> None:
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    done = pytest_interpreted(DEVICE / f"{checks}.py", interpret=not torch.cuda.is_available())
    if done.returncode == NO_TESTS and "SKIPPED" in done.stdout:
        pytest.skip(done.stdout.partition("SKIPPED")[2].splitlines()[0])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
