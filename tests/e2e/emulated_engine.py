"""An engine of the CUDA side, emulated on the CPU. It runs as a program, as engine_process.py
does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_process import Engine, Result, Run, answered, result_of, run_of


@dataclass(frozen=True)
class Emulated:
    """A run's ``result``, and its number of graph replays by the stage that captured the graph."""

    result: Result
    replays: dict[str, int]


def serve_emulated(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Emulated]:
    """Start an engine as on CUDA, and work through the runs."""
    found = answered(__file__, engine, runs, threads=1, fresh=True, TRITON_INTERPRET="1")
    return {name: Emulated(result_of(one["result"]), one["replays"]) for name, one in found.items()}


def main(job_path: str, results_path: str) -> None:
    from emulated import device, worker

    worker.configure()
    job = json.loads(Path(job_path).read_text())
    engine = Engine(job["engine"])
    found = {}
    for name, value in job["runs"].items():
        run = run_of(value)
        device.replays.clear()
        with sabotaged(run.sabotage, engine.runner):
            result = engine.work(run)
        found[name] = asdict(Emulated(result, dict(device.replays)))
        engine.llm.reset_prefix_cache()
    Path(results_path).write_text(json.dumps(found))


def sabotaged(name: str | None, runner: Any) -> Any:
    import emulated.sabotage
    import sabotage

    if name is None:
        return nullcontext()
    module = emulated.sabotage if hasattr(emulated.sabotage, name) else sabotage
    return getattr(module, name)(runner)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # With Mamba-2 layers, the end of oneDNN's cache of primitives crashes.
    sys.stdout.flush()
    os._exit(0)
