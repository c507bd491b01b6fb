"""Servers and other processes that tests start and that end with the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyntree_plugin import openmp, pair

START_SECONDS = 900
"""Most seconds for a server to start. One took 300 on a machine that was busy with other work;
this bound only tells a server that hangs."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, **parameters: str) -> Any:
    """Return the answer to a GET request: parsed if it is JSON, else as text."""
    query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
    with urllib.request.urlopen(url + query, timeout=60) as response:
        text = response.read().decode()
    return json.loads(text) if "json" in response.headers.get("Content-Type", "") else text


def completion(address: str, **body: object) -> urllib.request.Request:
    """Return a call of a server's completions."""
    headers = {"Content-Type": "application/json"}
    url = f"{address}/v1/completions"
    return urllib.request.Request(url, json.dumps(body).encode(), headers)


def wait_until(done: Callable[[], Any], seconds: float, what: str) -> Any:
    """Call ``done`` again and again, and return its first true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if answer := done():
                return answer
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"not within {seconds} s: {what}")


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; end it and all its child processes when the block ends."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Server:
    """A running server: its address, the file that it logs to, and its first process."""

    address: str
    log: Path
    process: subprocess.Popen[bytes]


@contextmanager
def server(
    folder: Path,
    *arguments: str,
    trees: bool = True,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    target: Path | None = None,
) -> Iterator[Server]:
    """Run a server of a target, by default the embedded one, with trees of the embedded draft.

    ``options``: those of dyntree, by default none.
    """
    models = pair.paths()
    target = target or models["target"]
    speculation = {
        "method": "draft_model",
        "model": str(models["draft"]),
        "num_speculative_tokens": 16,
    }
    with_trees = ("--speculative-config", json.dumps(speculation))
    with_trees += ("--dyntree", json.dumps(options or {}))
    address = f"http://127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "dyntree_plugin.cli", "serve", str(target)),
        *("--port", address.rpartition(":")[2]),
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--gpu-memory-utilization", "0.3"),
        *(with_trees if trees else ()),
        *arguments,
    ]
    library = openmp.library()
    preloaded = {} if library is None else {"LD_PRELOAD": str(library)}
    log = folder / "server.log"

    def healthy() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-8000:]}")
        return fetch(f"{address}/health") is not None

    with running(command, log, preloaded | dict(environment or {})) as process:
        try:
            wait_until(healthy, START_SECONDS, "a healthy server")
        except TimeoutError as error:
            raise RuntimeError(f"{error}:\n{log.read_text()[-8000:]}") from None
        yield Server(address, log, process)
