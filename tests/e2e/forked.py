"""Run programs in processes that have vLLM imported already, on a CPU.

The import takes 7 seconds of CPU time. A server of `multiprocessing` imports it once and starts no
thread. Every program begins as a copy of that server.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

IMPORTABLE = [
    *(str(Path(__file__).parents[number]) for number in range(3)),
    str(Path(__file__).parents[1] / "laws"),
]
"""Folders of the tests' modules, and of the repository."""
THREADS = 1
"""Number of OpenMP threads, which OpenMP reads from the environment when it is loaded."""
ON_EVERY_CORE = {"KMP_AFFINITY": "none"}
"""Without it, Intel's OpenMP binds every fork of a process to the first core."""

_lock = threading.Lock()


def run(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    seconds: float,
) -> int | None:
    """Run a Python program and return its exit status, or None if it took longer than ``seconds``.

    ``log`` gets what it prints. All its child processes end with it.
    """
    process = start(program, arguments, environment, log)
    try:
        process.join(seconds)
        return process.exitcode
    finally:
        end(process)


def start(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    **given: Any,
) -> BaseProcess:
    """Start a program as `run` does; ``given`` are values that it finds by these names."""
    context = multiprocessing.get_context("forkserver")
    # The server gets no path but that of its environment, and is silent if it cannot import.
    server = {**environment, **ON_EVERY_CORE, "PYTHONPATH": _path(environment)}
    with _lock, mock.patch.dict(os.environ, server):
        context.set_forkserver_preload(["quick_start"])
        forkserver.ensure_running()
    process = context.Process(
        target=_become, args=(program, arguments, dict(environment), log, given)
    )
    process.start()
    return process


def end(process: BaseProcess) -> None:
    """End a program that was started, with all its child processes."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def run_afresh(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    seconds: float,
) -> int | None:
    """Run a program as `run` does, but in a new process that has imported nothing."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, program, *arguments],
            env={**environment, "PYTHONPATH": _path(environment)},
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,  # A GPU machine ends what a call leaves in its session.
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # If one rank fails, the others wait for it forever, in native code.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _path(environment: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, [*IMPORTABLE, environment.get("PYTHONPATH")]))


def _become(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    given: dict[str, Any],
) -> None:
    if "quick_start" not in sys.modules:
        raise RuntimeError("the server of copies has not imported quick_start")
    os.setsid()
    with log.open("a") as stream:
        for printed in (1, 2):
            os.dup2(stream.fileno(), printed)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(program).parent), *filter(None, known)]
    runpy.run_path(program, given, run_name="__main__")
    # End as a process that was not forked: do not wait for the threads of engines.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
