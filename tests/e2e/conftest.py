"""The engines that these tests share. Each starts once, with one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import workload
from comparison import Outputs, by_request, explain, mismatches
from engine_process import Result, Run, serve
from references import serve_right
from serving import server as serving_server

Served = Callable[[str], Mapping[str, Result]]

PLAIN = "plain"


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> list[str]:
    """The engines that parameters of the tests name, one of them once."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    named = dict.fromkeys(spec.params.get("engine") for spec in parameters if spec is not None)
    return [name for name in named if name in workload.SAME_TOKENS or name in workload.DRAWN]


@pytest.fixture(scope="session")
def plain_run(asked: list[str]) -> Run:
    return workload.plain_run(asked)


@pytest.fixture(scope="session")
def served(plain_run: Run) -> Iterator[Served]:
    """Return a function that gives an engine's results by run name.

    The engine is one of `workload.SAME_TOKENS` or `workload.DRAWN`, or `PLAIN`, the one
    without trees.
    """
    jobs = {
        PLAIN: (
            workload.without_tree(**workload.MANY),
            {"all": plain_run, "broken_target": workload.BROKEN_TARGET},
        ),
        **workload.SAME_TOKENS,
        **workload.DRAWN,
    }
    found: dict[str, Future[Mapping[str, Result]]] = {}
    with ThreadPoolExecutor(1) as pool:

        def results(engine: str) -> Mapping[str, Result]:
            if engine not in found:  # One that fails is not started again, either.
                threads = workload.THREADS.get(engine, 1)
                run = serve_right if engine == PLAIN else partial(serve, threads=threads)
                found[engine] = pool.submit(run, *jobs[engine])
            return found[engine].result()

        yield results


@pytest.fixture(scope="session")
def plain_result(served: Served) -> Result:
    return served(PLAIN)["all"]


@pytest.fixture(scope="session")
def plain(plain_run: Run, plain_result: Result) -> Outputs:
    """Outputs of all requests on the engine without trees, by request key."""
    return by_request(plain_run, plain_result)


@pytest.fixture(scope="session")
def differing(served: Served, plain: Outputs) -> Callable[[str, str], str]:
    """Return a function that compares an engine's run with the engine without trees.

    It returns a description of the differences, empty if there are none.
    """

    def differences(engine: str, name: str) -> str:
        run = workload.SAME_TOKENS[engine][1][name]
        found = mismatches(run, served(engine)[name], plain)
        return explain(found) if found else ""

    return differences


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with whole trees, whatever a step costs on this machine."""
    folder = tmp_path_factory.mktemp("server")
    with serving_server(folder, options={"budget": "fixed"}) as found:
        yield found.address
