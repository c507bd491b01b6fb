"""A command that a signal ends leaves no process, whatever waits for one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from serving import wait_until

# A process that takes no notice of signals, as an engine of vLLM's that starts, and one of its own.
CHILD = """
import signal, subprocess, sys, time
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("started", flush=True)
time.sleep(300)
"""
COMMAND = f"""
import signal, subprocess, sys, time
import psutil
from dyntree_plugin.commands import ending

# A child is killed long before its own: a command that waits for it may end in between.
def send_slowly(process, number, send=psutil.Process.send_signal):
    send(process, number)
    time.sleep(0.5)

def wait_in_order(processes, timeout, wait=psutil.wait_procs):
    gone, alive = wait(processes, timeout)
    return gone, sorted(alive, key=lambda each: each.pid)

psutil.Process.send_signal, psutil.wait_procs = send_slowly, wait_in_order
for each in (signal.SIGINT, signal.SIGHUP):  # a shell starts jobs that ignore them
    signal.signal(each, signal.SIG_DFL)
ending._GRACE_SECONDS, ending._PATIENCE_SECONDS = 0.5, 2

@ending.ends_by_signals()
def command(how):
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
    try:
        try:
            time.sleep(300)
        except KeyboardInterrupt:  # as vLLM does, which then waits for engines
            time.sleep(300)
    except ending.Ended:
        print("stops", flush=True)
        time.sleep(1)
        print("kept", flush=True)
        if how == "waits":
            child.wait()
            print("waited", flush=True)
        elif how == "stays":
            time.sleep(300)
        raise
command(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("number", "how", "more"),
    [
        (signal.SIGINT, "ends", []),
        (signal.SIGTERM, "ends", []),
        (signal.SIGHUP, "ends", []),
        (signal.SIGTERM, "waits", ["waited"]),
        (signal.SIGTERM, "stays", []),
    ],
)
def test_no_process_is_left(
    tmp_path: Path, number: signal.Signals, how: str, more: list[str]
) -> None:
    told = tmp_path / "told"
    with told.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-c", COMMAND, how], stdout=stream)
    begun = [psutil.Process(process.pid)]
    try:
        wait_until(lambda: "started" in told.read_text(), 60, "a child")
        begun += begun[0].children(recursive=True)
        assert len(begun) == 3
        process.send_signal(number)
        wait_until(lambda: "stops" in told.read_text(), 60, "the first signal")
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert told.read_text().split() == ["started", "stops", "kept", *more]
        psutil.wait_procs(begun, 5)
        assert not [each for each in begun if each.is_running()]
    finally:
        for each in filter(psutil.Process.is_running, begun):
            each.kill()
