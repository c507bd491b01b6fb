"""Two nodes on one machine, over loopback or in network namespaces of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from engine_process import DEFAULTS, Run
from ranks import UNBOUND
from serving import free_port


@dataclass(frozen=True)
class Node:
    """A node: what to put before a command that runs on it, and the environment there."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Nodes:
    """Two nodes that reach one another. ``first``'s address is ``address``; `cut` parts them."""

    first: Node
    second: Node
    address: str
    cut: Callable[[], None] | None = None

    def arguments(self, rank: int, port: int) -> dict[str, Any]:
        """Return the arguments of ``LLM`` on one of the nodes; both need the same free port."""
        return {
            "distributed_executor_backend": "mp",
            "nnodes": 2,
            "node_rank": rank,
            "master_addr": self.address,
            "master_port": port,
        }


@contextmanager
def loopback() -> Iterator[Nodes]:
    yield Nodes(Node(), Node(), "127.0.0.1")


@contextmanager
def namespaces() -> Iterator[Nodes]:
    """Give the second node a network of its own, with one link to the first node's.

    The test is skipped if this machine does not allow it.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    name = f"dyntree{os.getpid()}"
    # Two octets of the process, so that tests that run beside this one have other networks.
    subnet = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
    ends = [f"dt{os.getpid()}a", f"dt{os.getpid()}b"]
    addresses = [f"{subnet}.1", f"{subnet}.2"]
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.decode().strip()}")
    try:
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", name)
        for at, end, address in zip(([], ["-n", name]), ends, addresses, strict=True):
            _ip(*at, "addr", "add", f"{address}/24", "dev", end)
            _ip(*at, "link", "set", end, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        first, second = (
            {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": end}
            for end, address in zip(ends, addresses, strict=True)
        )
        yield Nodes(
            Node((), first),
            Node(("ip", "netns", "exec", name), second),
            addresses[0],
            lambda: _ip("link", "set", ends[0], "down"),
        )
    finally:
        with suppress(subprocess.CalledProcessError):
            # Without the namespace it would go, too, but later.
            _ip("link", "del", ends[0])
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


LINKS: Mapping[str, Callable[[], Any]] = {"loopback": loopback, "namespaces": namespaces}


Served = TypeVar("Served")


def serve_on_nodes(
    nodes: Nodes,
    engine: Mapping[str, Any],
    runs: Mapping[str, Run],
    folder: Path,
    serve: Callable[..., Served],
) -> Served:
    """Work through the runs on an engine whose ranks are on two nodes; the client is on the first.

    The second node's log goes to ``folder``. ``serve`` starts the first node's part, as
    `ranks.serve_on_ranks` does.
    """
    port = free_port()
    command = headless(DEFAULTS | engine | nodes.arguments(1, port))
    path = {"PYTHONPATH": str(Path(__file__).parent)}  # where sabotage.py is
    with started(nodes.second, command, folder / "second.log", **path):
        return serve(engine | nodes.arguments(0, port), runs, **nodes.first.environment)


def headless(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command that serves on a node without clients, with these arguments of ``LLM``."""
    return [*serving(arguments), "--headless"]


def serving(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command that serves with these arguments of ``LLM``."""
    command = [sys.executable, "-m", "dyntree_plugin.cli", "serve", arguments["model"]]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command += [flag] if value else []
        elif name != "model":
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            command += [flag, text]
    return command


@contextmanager
def started(node: Node, command: list[str], log: Path, **variables: str) -> Iterator[psutil.Popen]:
    """Run a command on a node; kill it and all processes that it has started in the end."""
    with log.open("w") as stream:
        process = psutil.Popen(
            [*node.prefix, *command],
            env={**os.environ, **UNBOUND, "OMP_NUM_THREADS": "1", **node.environment, **variables},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def kill_session(session: int) -> None:
    """Kill every process of a session, as the death of a node does. Orphans belong to it, too."""
    for process in session_of(session):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def session_of(session: int) -> list[psutil.Process]:
    """Return the processes of a session that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
