"""If a rank or a node dies, the server ends with an error.

vLLM takes a few seconds; the bound only tells a server that hangs.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
import workload
from engine_process import DEFAULTS
from nodes import LINKS, Node, Nodes, headless, kill_session, serving, session_of, started
from serving import START_SECONDS, completion, fetch, free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

END_SECONDS = 120
TIMEOUT_SECONDS = 20
"""How long vLLM waits for a step, in the test whose nodes are parted; by default it is 300."""
LONG = {"max_tokens": 480, "ignore_eos": True, "temperature": 0}
IMPORTABLE = {"PYTHONPATH": str(Path(__file__).parent)}


@dataclass(frozen=True)
class Served:
    """A server: the first process on its first node, whose clients' address it is."""

    address: str
    process: psutil.Popen
    log: Path


@contextmanager
def on_two_nodes(
    nodes: Nodes,
    folder: Path,
    engine: Mapping[str, Any],
    **variables: str,
) -> Iterator[tuple[Served, psutil.Popen]]:
    """Start a server on two nodes and do not wait for it; yield it and the second's process."""
    master, port = free_port(), free_port()
    both = DEFAULTS | {"tensor_parallel_size": 2}
    command = serving(both | engine | nodes.arguments(0, master) | {"port": port})
    other_command = headless(both | engine | nodes.arguments(1, master))
    folder.mkdir()
    log = folder / "first.log"
    variables = IMPORTABLE | variables
    with (
        started(nodes.first, command, log, **variables) as process,
        started(nodes.second, other_command, folder / "second.log", **variables) as other,
    ):
        yield Served(f"http://127.0.0.1:{port}", process, log), other


def answer_of(server: Served, streaming: Event) -> str:
    """Wait for a server, and return the received part of a long answer, however it ended.

    ``streaming`` is set when its first part has come.
    """

    def healthy() -> bool:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{server.log.read_text()[-8000:]}")
        return fetch(f"{server.address}/health") is not None

    wait_until(healthy, START_SECONDS, "a healthy server")
    call = completion(server.address, prompt="def f(", stream=True, **LONG)
    received = b""
    try:
        with urllib.request.urlopen(call, timeout=START_SECONDS) as response:
            for line in response:
                received += line
                streaming.set()
    except OSError as error:
        received += f"cut off: {error}".encode()
    return received.decode()


def seconds_to_end(
    server: Served, kill: Callable[[], object], ended: Callable[[psutil.Popen], bool]
) -> float:
    """Kill something while an answer is streamed; return the seconds until the server has ended.

    The answer must end with an error.
    """
    streaming = Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(answer_of, server, streaming)
        while not streaming.wait(0.2):
            if answer.done():
                answer.result()
        began = time.monotonic()
        kill()
        received = answer.result(END_SECONDS)
    assert '"code": 500' in received or "cut off" in received, received[-500:]
    return wait_for_end(server, began, ended)


def wait_for_end(server: Served, began: float, ended: Callable[[psutil.Popen], bool]) -> float:
    wait_until(partial(ended, server.process), END_SECONDS, "the end of the server")
    return time.monotonic() - began


def all_have_ended(process: psutil.Popen) -> bool:
    """Return whether a process and all that it has started have ended."""
    return not session_of(process.pid)


def has_ended(process: psutil.Popen) -> bool:
    return process.poll() is not None


def kill_engine(server: Served) -> None:
    """Kill the process of the server's node that schedules."""
    processes = session_of(server.process.pid)
    (engine,) = (p for p in processes if " ".join(p.cmdline()).startswith("VLLM::EngineCore"))
    engine.kill()


@pytest.mark.parametrize("killed", ["the second node", "the engine of the first"])
def test_if_a_node_or_its_engine_dies_the_server_ends(
    killed: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Control: if nothing is killed, the answer ends with no error."""
    with (
        LINKS["loopback"]() as nodes,
        on_two_nodes(nodes, tmp_path / "nodes", workload.tree()) as (server, second),
    ):
        with pytest.raises(AssertionError, match="length"):
            seconds_to_end(server, lambda: None, all_have_ended)
        kill = {
            "the second node": partial(kill_session, second.pid),
            "the engine of the first": partial(kill_engine, server),
        }
        seconds = seconds_to_end(server, kill[killed], all_have_ended)
    tell(f"{killed} dies: the server ended after {seconds:.1f} s")


def test_if_the_nodes_are_parted_the_server_ends_after_vllms_timeout(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """vLLM leaves its rank on the first node behind, which waits in gloo."""
    timeout = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS)}
    with (
        LINKS["namespaces"]() as nodes,
        on_two_nodes(nodes, tmp_path / "nodes", workload.tree(), **timeout) as (server, _),
    ):
        seconds = seconds_to_end(server, nodes.cut, has_ended)
    tell(f"the nodes are parted for {TIMEOUT_SECONDS} s: the server ended after {seconds:.1f} s")


def test_if_a_rank_dies_while_steps_are_measured_the_server_ends(tmp_path: Path) -> None:
    """Without trees vLLM may wait forever: the first node waits for an answer of every rank, and
    does not watch those of other nodes. The steps that are measured end with an error."""
    engine = workload.tree() | {"worker_extension_cls": "dies_while_measuring.Extension"}
    with (
        LINKS["loopback"]() as nodes,
        on_two_nodes(nodes, tmp_path / "nodes", engine) as (server, second),
    ):
        wait_until(partial(all_have_ended, second), START_SECONDS, "the end of the second node")
        wait_for_end(server, time.monotonic(), all_have_ended)
        assert "died unexpectedly" in (tmp_path / "nodes" / "second.log").read_text()


def test_if_an_actor_of_ray_dies_the_server_ends(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    import ray_on_cpu

    log, port = tmp_path / "log", free_port()
    of_ray = {"tensor_parallel_size": 2, "distributed_executor_backend": ray_on_cpu.EXECUTOR}
    command = serving(DEFAULTS | workload.tree() | of_ray | {"port": port})
    with ray_on_cpu.cluster(2) as address:
        variables = IMPORTABLE | {"RAY_ADDRESS": address}
        with started(Node(), command, log, **variables) as process:
            server = Served(f"http://127.0.0.1:{port}", process, log)
            seconds = seconds_to_end(server, ray_on_cpu.kill_an_actor, all_have_ended)
    tell(f"an actor of Ray dies: the server ended after {seconds:.1f} s")
