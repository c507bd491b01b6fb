"""End a command by a signal, and its processes with it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 5.0
_PATIENCE_SECONDS = 10.0
_killing = threading.Lock()


class Ended(SystemExit):
    """A signal ends the command. ``code``: the exit status, 128 and the signal's number.

    It is no KeyboardInterrupt, which vLLM's `zmq_socket_ctx` swallows: the start of an engine would
    go on without its processes.
    """

    code: int


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP raise `Ended` once in a command that this decorates.

    No process that it started is left. vLLM does not see to that: an engine that starts takes
    notice neither of a signal nor of the end of the process that waits for it.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # `timeout` sends a process two
            threading.Thread(target=_insist, args=(128 + number,), daemon=True).start()
            raise Ended(128 + number)

    # What is ignored stays so: `nohup` ignores SIGHUP.
    heeded = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, handle) for each in heeded}
    try:
        yield
    finally:
        if received:
            _end_children(_GRACE_SECONDS)
            raise Ended(128 + received[0])
        for number, handler in before.items():
            signal.signal(number, handler)


def _insist(status: int) -> None:
    """End the children of a command that takes long to end, and then the command itself.

    Code that has swallowed the exception may wait for a child, or for ever.
    """
    time.sleep(_PATIENCE_SECONDS)
    _end_children()
    time.sleep(_PATIENCE_SECONDS)
    _end_children()
    os._exit(status)


def _end_children(grace: float = 0.0) -> None:
    """Kill this process' descendants, unless SIGTERM ends them within ``grace`` seconds.

    One thread does so at a time: a child that is dead no longer names its own children, so the
    command may not end before the thread that listed them has killed them.

    Python's resource tracker is left. It ends with this process, and then removes shared memory
    that the killed ones have left.
    """
    try:
        import psutil  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return  # vLLM brings it, and only vLLM starts processes

    with _killing:
        children = [each for each in psutil.Process().children(recursive=True) if not _tracks(each)]
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _GRACE_SECONDS)):
            for each in children if seconds else ():
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
            _, children = psutil.wait_procs(children, seconds)


def _tracks(process: Any) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return b"resource_tracker" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return False
