"""No step of an engine on a GPU waits for it: torch raises if one does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parent / "steps_on_a_gpu.py"


def steps(*more: str, **arguments: Any) -> subprocess.CompletedProcess[str]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folders = str(SCRIPT.parents[1]), str(SCRIPT.parents[2])
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, SCRIPT, json.dumps(arguments), *more],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.mark.parametrize(
    "arguments",
    [{"enforce_eager": True}, {}, {"enforce_eager": True, "head": True}, {"head": True}],
    ids=["eager", "graphs", "a head, eager", "a head, graphs"],
)
def test_whole_steps_do_not_wait(arguments: dict[str, Any]) -> None:
    done = steps(**arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    # vLLM and PyTorch write there, too.
    counted = re.search(r"^(\d+) steps$", done.stdout, re.MULTILINE)
    assert counted is not None, done.stdout[-3000:]
    assert int(counted[1]) > 3


def test_a_step_that_waits_is_found() -> None:
    done = steps("waits", enforce_eager=True)
    assert done.returncode != 0
    assert "synchronizing CUDA operation" in done.stderr
