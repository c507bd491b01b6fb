"""The engines of these tests come in the order in which tests ask for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from threading import Event

import pytest
from engine_process import Result
from engine_queue import EngineQueue


class Engines:
    """Engines without results. They wait until all may begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.one_waits, self.may_begin = Event(), Event()

    def __call__(self, name: str) -> Mapping[str, Result]:
        self.begun.append(name)
        self.one_waits.set()
        assert self.may_begin.wait(60)
        if name == "broken":
            raise RuntimeError("the engine failed")
        return {}


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def queue(engines: Engines) -> Iterator[EngineQueue]:
    found = EngineQueue(engines, ["first", "second", "third"], places=1)
    assert engines.one_waits.wait(60)
    yield found
    engines.may_begin.set()
    found.close()


def test_engines_work_in_the_given_order_and_once(engines: Engines, queue: EngineQueue) -> None:
    engines.may_begin.set()
    deadline = time.monotonic() + 60
    while len(engines.begun) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engines.begun == ["first", "second", "third"]
    for name in ("third", "first", "third"):
        assert queue.results(name) == {}
    assert len(engines.begun) == 3


@pytest.mark.parametrize("name", ["third", "another"])
def test_an_engine_that_is_asked_for_comes_next(
    engines: Engines, queue: EngineQueue, name: str
) -> None:
    asked = queue.ask(name)
    engines.may_begin.set()
    asked.result()
    queue.results("second")
    assert engines.begun.index(name) == 1


def test_a_failure_reaches_those_who_ask(engines: Engines, queue: EngineQueue) -> None:
    engines.may_begin.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed"):
            queue.results("broken")
    assert queue.results("third") == {}
    assert engines.begun.count("broken") == 1
