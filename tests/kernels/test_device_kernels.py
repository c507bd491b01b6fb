"""Run the checks of the Triton kernels: on the GPU if there is one, else in the interpreter.

The interpreter is chosen when triton is imported, so the checks have processes of their own. One
process runs many files, because its imports take as long as most of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import pytest_interpreted

DEVICE = Path(__file__).parent / "device"
CHECKS = sorted(path.stem for path in DEVICE.glob("check_*.py"))
ATTENTION = {"check_attention", "check_latent"}
"""Each has a process of its own, so that several can run at once."""
SLOW = {"check_grafts", "check_growth", "check_learn"}
"""Half a minute and more of the interpreter. Other checks run these kernels as parts of drafting
and of steps."""
OF_GROWTH = "usual or chained or told_apart or is_seen"
"""Names of the checks of growth that run always."""


@pytest.mark.parametrize(
    "checks",
    [
        *(pytest.param([name], id=name) for name in sorted(ATTENTION)),
        pytest.param([name for name in CHECKS if name not in ATTENTION | SLOW], id="others"),
        pytest.param(["check_growth", "check_grafts", "-k", OF_GROWTH], id="growth"),
        pytest.param(sorted(SLOW), id="slow", marks=pytest.mark.slow),
    ],
)
def test_checks_pass(checks: list[str]) -> None:
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    given = [str(DEVICE / f"{name}.py") if name in CHECKS else name for name in checks]
    done = pytest_interpreted(*given, interpret=not torch.cuda.is_available())
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
