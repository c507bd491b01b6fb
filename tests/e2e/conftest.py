"""The engines that these tests share. Each starts once, several at a time with one thread each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import workload
from comparison import Outputs, by_request, explain, mismatches
from engine_process import PARALLEL, Result, serve
from serving import server as serving_server

Served = Callable[[str], Mapping[str, Result]]

PLAIN = "plain"


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """The results of one of `workload.ENGINES`, or the one without trees, by names of runs."""
    jobs = {
        PLAIN: (
            workload.without_tree(),
            {"all": workload.PLAIN_RUN, "broken_target": workload.BROKEN_TARGET},
        ),
        **workload.ENGINES,
        **workload.DRAWN,
    }
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params.get("engine") for spec in parameters if spec is not None}
    with ThreadPoolExecutor(PARALLEL) as pool:
        started: dict[str, Future[dict[str, Result]]] = {}

        def start(engine: str) -> None:
            threads = workload.THREADS.get(engine, 1)
            started[engine] = pool.submit(serve, *jobs[engine], threads=threads)

        def results(engine: str) -> dict[str, Result]:
            if engine not in started:
                start(engine)
            return started[engine].result()

        for engine in jobs:
            if engine in wanted or (engine == PLAIN and wanted - {None}):
                start(engine)
        yield results
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def plain_result(served: Served) -> Result:
    return served(PLAIN)["all"]


@pytest.fixture(scope="session")
def plain(plain_result: Result) -> Outputs:
    """What every request of those engines gets without trees."""
    return by_request(workload.PLAIN_RUN, plain_result)


@pytest.fixture(scope="session")
def differing(served: Served, plain: Outputs) -> Callable[[str, str], str]:
    """Says how an engine's run differs from the same requests without trees; empty if it does
    not."""

    def differences(engine: str, name: str) -> str:
        run = workload.ENGINES[engine][1][name]
        found = mismatches(run, served(engine)[name], plain)
        return explain(found) if found else ""

    return differences


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with trees, as the README starts it."""
    with serving_server(tmp_path_factory.mktemp("server")) as found:
        yield found.address
