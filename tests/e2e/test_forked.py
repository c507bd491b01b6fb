"""A forked program runs as Python would run it, except that vLLM is already imported."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import forked
import psutil
import pytest

from dyntree_plugin import openmp

pytestmark = pytest.mark.e2e

TELLING = """
import json, os, sys
from pathlib import Path

if __name__ == "__main__":
    told = {
        "arguments": sys.argv[1:],
        "beside": Path(sys.path[0]).resolve() == Path(__file__).resolve().parent,
        "variable": os.environ.get("A_VARIABLE"),
        "threads": len(os.listdir("/proc/self/task")),
        "leads": os.getsid(0) == os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "imported": "vllm" in sys.modules,
    }
    Path(sys.argv[1]).write_text(json.dumps(told))
    print("told")
"""
FAILING = "import sys\nprint('so it was', flush=True)\nsys.exit(3)"
HANGING = """
import subprocess, sys, time
from pathlib import Path

child = subprocess.Popen(["sleep", "600"])
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def run(folder: Path, code: str, seconds: float = 300) -> tuple[int | None, str, str]:
    """Return a program's status, what it printed, and what it wrote."""
    program, written, log = (folder / name for name in ("program.py", "written", "log"))
    program.write_text(code)
    log.touch()
    environment = os.environ | {"A_VARIABLE": str(folder)}
    if (library := openmp.library()) is not None:
        environment["LD_PRELOAD"] = str(library)
    status = forked.run(str(program), [str(written)], environment, log, seconds)
    return status, log.read_text(), written.read_text() if written.exists() else ""


def test_it_finds_its_environment_vllm_every_core_and_no_thread(tmp_path: Path) -> None:
    status, printed, told = run(tmp_path, TELLING)
    assert (status, printed) == (0, "told\n"), printed
    assert json.loads(told) == {
        "arguments": [str(tmp_path / "written")],
        "beside": True,
        "variable": str(tmp_path),
        "threads": 1,
        "leads": True,
        "cores": sorted(os.sched_getaffinity(0)),
        "imported": True,
    }


def test_a_program_that_fails_says_so(tmp_path: Path) -> None:
    status, printed, _ = run(tmp_path, FAILING)
    assert status == 3
    assert "so it was" in printed


def test_one_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    run(tmp_path, TELLING)  # start the fork server, so that only the program is timed
    (tmp_path / "written").unlink()
    status, _, child = run(tmp_path, HANGING, seconds=8)
    assert status is None
    end = time.monotonic() + 60
    while psutil.pid_exists(int(child)) and time.monotonic() < end:
        if psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        assert not psutil.pid_exists(int(child))
