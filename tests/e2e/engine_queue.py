"""Engines that work through their runs one after another, or several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from engine_process import Result

Results = Mapping[str, Result]


class EngineQueue:
    """Serves engines by name in the given order; one whose results are asked for comes next.

    Without the latter, a test that needs the last engine would wait for all others, and a test has
    a time limit.
    """

    def __init__(self, serve: Callable[[str], Results], names: Iterable[str], places: int) -> None:
        self._serve = serve
        self._pool = ThreadPoolExecutor(places)
        self._lock = Lock()
        self._waiting: list[str] = []
        self._results: dict[str, Future[Results]] = {}
        for name in names:
            self._add(name, len(self._waiting))

    def results(self, name: str) -> Results:
        return self.ask(name).result()

    def ask(self, name: str) -> Future[Results]:
        with self._lock:
            if name in self._waiting:
                self._waiting.remove(name)
                self._waiting.insert(0, name)
            elif name not in self._results:
                self._add(name, 0)
        return self._results[name]

    def close(self) -> None:
        """Wait for the engines that are at work, and start no other."""
        self._pool.shutdown(cancel_futures=True)

    def _add(self, name: str, place: int) -> None:
        self._results[name] = Future()
        self._waiting.insert(place, name)
        self._pool.submit(self._next)

    def _next(self) -> None:
        with self._lock:
            name = self._waiting.pop(0)
        try:
            self._results[name].set_result(self._serve(name))
        except Exception as error:  # noqa: BLE001 - raised by the test that asks for the engine
            self._results[name].set_exception(error)
