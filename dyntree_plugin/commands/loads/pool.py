"""Keep several engines, one of which runs at a time."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Self

from dyntree_plugin import signals
from dyntree_plugin.commands.loads.engine import FAILED, REFUSED, Answers, Around, main
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.runs import Engine, Run
from dyntree_plugin.secrets import hidden

_LOG_CHARACTERS = 6000
_END_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_BY_SIGNAL = re.compile(r"(?:exit ?code:? |core proc\(s\): \{'\w+': )-(\d+)")


class EngineProcess:
    """A started engine. Its process is stopped between loads, so that its threads do not spin."""

    def __init__(self, engine: Engine, log: Path, *, around: Around | None = None) -> None:
        """Begin to start the engine; call `wait` before using it.

        ``around``: makes the context in which the engine starts; it must be picklable.
        """
        self._name, self._log = engine.name, log
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=main, args=(theirs, engine.arguments, log, around), name=engine.name
        )
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until the engine has started.

        Raises:
            ValueError: if vLLM or the plugin refuses the engine's arguments.
            RuntimeError: if it fails to start for another reason.
        """
        self._receive()
        self._send(signal.SIGSTOP)

    def serve(self, load: Load) -> tuple[Run, Answers]:
        """Let the engine serve a load.

        Raises:
            RuntimeError: if it fails, or its process has ended.
        """
        self._send(signal.SIGCONT)
        try:
            with suppress(OSError):  # where its process has ended, `_receive` says how
                self._connection.send(load)
            answer: tuple[Run, Answers] = self._receive()
            return answer
        finally:
            self._send(signal.SIGSTOP)

    def resident_bytes(self) -> int:
        """Return the bytes of memory that the process holds."""
        status = Path(f"/proc/{self._process.pid}/statm")
        pages = int(status.read_text().split()[1]) if status.exists() else 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        self._send(signal.SIGCONT)
        with suppress(OSError):  # it may have ended by itself
            self._connection.send(None)
        self._process.join(_END_SECONDS)
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _receive(self) -> Any:
        try:
            # A process that the engine has started may hold the connection open.
            while not self._connection.poll(_LOOK_SECONDS):
                if not self._process.is_alive() and not self._connection.poll():
                    raise EOFError
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            kind, value = FAILED, f"its process has ended, exit code: {self._process.exitcode}"
        if kind == REFUSED:
            raise ValueError(hidden(f"{self._name}: {value}"))
        if kind == FAILED:
            # A process that could not start has no log; its output went to the screen.
            printed = self._log.read_text(errors="replace") if self._log.exists() else ""
            told = f"{value}\n{printed[-_LOG_CHARACTERS:]}"
            failed = ", ".join([f"the engine `{self._name}` failed", *_killed(told)])
            raise RuntimeError(hidden(f"{failed}: {told}"))
        return value

    def _send(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)


Start = Callable[[Engine, Path], EngineProcess]
"""Begins to start an engine, whose output goes to the file."""


class Pool:
    """Keeps as many engines as fit; the others take turns in the last place.

    ``places``: their number. None means one on a GPU; on a CPU another engine fits as long as the
    largest one takes at most half of the free memory.
    """

    def __init__(self, places: int | None = None, start: Start = EngineProcess) -> None:
        self._places, self._start = places, start
        self._running: dict[str, EngineProcess] = {}
        self._started = 0

    def __enter__(self) -> Self:
        self._logs = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_: object) -> None:
        while self._running:
            self._end_last()
        self._logs.cleanup()

    @contextmanager
    def engine(self, engine: Engine, warm_up: Sequence[Load] = ()) -> Iterator[EngineProcess]:
        """Return the engine; unless it runs, start it and warm it up with these loads."""
        if engine.name not in self._running:
            while self._running and not self._has_room():
                self._end_last()
            self.start([(engine, warm_up)])
        yield self._running[engine.name]

    def start(self, engines: Sequence[tuple[Engine, Sequence[Load]]]) -> None:
        """Start all of these engines, however many places there are; then warm up each with its
        loads."""
        for engine, _ in engines:
            log = Path(self._logs.name) / f"{self._started}.log"
            self._started += 1
            self._running[engine.name] = self._start(engine, log)
        for engine, _ in engines:
            self._running[engine.name].wait()
        for engine, warm_up in engines:
            for load in warm_up:
                self._running[engine.name].serve(load)

    def holds(self, engines: int) -> bool:
        """Return whether there are places for this number of engines."""
        return self._places is not None and self._places >= engines

    def _has_room(self) -> bool:
        if self._places is not None:
            return len(self._running) < self._places
        import torch

        if torch.cuda.is_available():
            return False
        largest = max(process.resident_bytes() for process in self._running.values())
        return largest < _free_bytes() / 2

    def _end_last(self) -> None:
        _, process = self._running.popitem()
        process.end()


def _killed(told: str) -> Iterator[str]:
    """Yield a text for each signal that ended a process, by Python's and vLLM's exit codes."""
    for number in dict.fromkeys(map(int, _BY_SIGNAL.findall(told))):
        if reason := signals.explain(-number):
            yield f"a process was ended by {reason}"


def _free_bytes() -> int:
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)
