"""The engines of these tests come in the order in which tests ask for them."""

from __future__ import annotations

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


def test_engines_work_once_in_the_given_order(engines: Engines, queue: EngineQueue) -> None:
    engines.may_begin.set()
    queue.results("third")
    assert queue.results("first") == queue.results("third") == {}
    queue.results("second")
    assert sorted(engines.begun) == ["first", "second", "third"]
    assert engines.begun[0] == "first"


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
