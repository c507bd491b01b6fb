"""An engine of the CUDA side, emulated on the CPU. It runs as a program, as engine_process.py
does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from engine_process import Engine, Result, Run, answered, main, result_of


@dataclass(frozen=True)
class Emulated:
    """A run's ``result``, its number of graph replays by the stage that captured the graph, and of
    launches of dyntree's kernels outside of graphs."""

    result: Result
    replays: dict[str, int]
    launches: dict[str, int]


def serve_emulated(
    engine: Mapping[str, Any], runs: Mapping[str, Run], **environment: str
) -> dict[str, Emulated]:
    """Start an engine as on CUDA, and work through the runs."""
    found = answered(__file__, engine, runs, threads=1, TRITON_INTERPRET="1", **environment)
    return {
        name: Emulated(result_of(one["result"]), one["replays"], one["launches"])
        for name, one in found.items()
    }


class EmulatedEngine(Engine):
    def sabotaged(self, name: str) -> AbstractContextManager[None]:
        import emulated.sabotage

        if not hasattr(emulated.sabotage, name):
            return super().sabotaged(name)
        broken: AbstractContextManager[None] = getattr(emulated.sabotage, name)(self.runner)
        return broken

    def emulate(self, run: Run) -> Emulated:
        from emulated import device

        device.replays.clear()
        device.launches.clear()
        result = self.work(run)
        self.llm.reset_prefix_cache()
        return Emulated(result, dict(device.replays), dict(device.launches))


if __name__ == "__main__":
    from emulated import worker
    from quick_interpreter import multiplied_in_order

    worker.configure()
    # Only where bits are compared, since it is slower.
    with multiplied_in_order() if "VLLM_BATCH_INVARIANT" in os.environ else nullcontext():
        main(EmulatedEngine, EmulatedEngine.emulate)
    # With Mamba-2 layers, the end of oneDNN's cache of primitives crashes.
    sys.stdout.flush()
    os._exit(0)
