"""An engine whose late compilations are noted. It runs as a program, as engine_process.py does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import compilations
from engine_process import Engine, Run, answered, main


def late(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Return, by run, the kernels that were compiled during it. The engine rehearses after the
    first run, and not before."""
    return answered(__file__, engine, runs, threads=1)


class LateRehearsal(Engine):
    def __init__(self, arguments: dict[str, Any]) -> None:
        with mock.patch("dyntree_plugin.engine.cpu.worker.rehearse"):
            super().__init__(arguments)
        self._has_rehearsed = False

    def late(self, run: Run) -> list[str]:
        from dyntree_plugin.engine.rehearsal import rehearse

        before = compilations.versions()
        self.work(run)
        found = compilations.since(before)
        if not self._has_rehearsed:
            self._has_rehearsed = True
            self.llm.reset_prefix_cache()  # Rehearsed requests write into its blocks.
            for name in [*self.runner.req_states.req_id_to_index]:  # vLLM does so with a next step.
                self.runner._remove_request(name)
            rehearse(self.llm.llm_engine.model_executor.driver_worker.worker)
        return found


if __name__ == "__main__":
    main(LateRehearsal, LateRehearsal.late)
