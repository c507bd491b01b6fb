"""One server with trees, and one Prometheus that scrapes it, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stack
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from stack import Prometheus, Server


@pytest.fixture(scope="session")
def binaries() -> Path:
    """Return the folder with ``prometheus`` and ``promtool``."""
    try:
        return stack.binaries()
    except stack.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with whole trees and two API processes, which reports acceptance per
    request."""
    arguments = ("--dyntree.budget", "fixed")
    arguments += ("--per-request-spec-decode-metrics", "detailed", "--api-server-count", "2")
    folder = tmp_path_factory.mktemp("server")
    counters = folder / stack.COUNTERS
    counters.mkdir()
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(counters)}
    with stack.server(folder, *arguments, environment=environment) as found:
        yield found


@pytest.fixture(scope="session")
def rewriting() -> Iterator[str]:
    """Yield the address of a metric called ``vllm:probe``, served by prometheus_client itself."""
    registry = CollectorRegistry()
    Gauge("vllm:probe", "A metric with a colon in its name.", registry=registry).set(1)
    port = stack.free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def prometheus(
    binaries: Path, server: Server, rewriting: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with stack.prometheus(folder, server.address, rewriting) as found:
        yield found
