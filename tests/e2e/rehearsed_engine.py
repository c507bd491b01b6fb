"""An engine whose compilations are noted. It runs as a program, as engine_process.py does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import compilations
from engine_process import Engine, Run, answered, main


def compiled(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, list[list[str]]]:
    """Return, by run, the kernels that were compiled in the rehearsal, and those in the run.

    The process is new: a copy has kernels.
    """
    return answered(__file__, engine, runs, threads=1, afresh=True)


class NotedEngine(Engine):
    def __init__(self, arguments: dict[str, Any]) -> None:
        from dyntree_plugin.engine.start.rehearsal import rehearse

        self._rehearsed: list[str] = []

        def noted(worker: Any) -> None:
            before = compilations.versions()
            rehearse(worker)
            self._rehearsed = compilations.since(before)

        with mock.patch("dyntree_plugin.engine.cpu.worker.rehearse", noted):
            super().__init__(arguments)

    def compiled(self, run: Run) -> list[list[str]]:
        before = compilations.versions()
        self.work(run)
        return [self._rehearsed, compilations.since(before)]


if __name__ == "__main__":
    main(NotedEngine, NotedEngine.compiled)
