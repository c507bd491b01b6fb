"""The engines that these tests share. Each starts once, when a test first asks for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
import workload
from comparison import Outputs, by_request, explain, mismatches
from engine_process import Result, serve

Served = dict[str, Result]


@pytest.fixture(scope="session")
def served() -> Callable[[str], Served]:
    """The results of one of `workload.ENGINES`, by the names of its runs."""

    @functools.cache
    def results(engine: str) -> Served:
        return serve(*workload.ENGINES[engine])

    return results


@pytest.fixture(scope="session")
def plain_result() -> Result:
    return serve(workload.without_tree(), {"all": workload.PLAIN_RUN})["all"]


@pytest.fixture(scope="session")
def plain(plain_result: Result) -> Outputs:
    """What every request of those engines gets without trees."""
    return by_request(workload.PLAIN_RUN, plain_result)


@pytest.fixture(scope="session")
def differing(served: Callable[[str], Served], plain: Outputs) -> Callable[[str, str], str]:
    """Says how an engine's run differs from the same requests without trees; empty if it does
    not."""

    def differences(engine: str, name: str) -> str:
        run = workload.ENGINES[engine][1][name]
        found = mismatches(run, served(engine)[name], plain)
        return explain(found) if found else ""

    return differences


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Shows measured figures among pytest's own output."""

    def show(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}\n")

    return show
