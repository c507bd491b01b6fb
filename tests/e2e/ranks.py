"""A tensor-parallel engine, and the trees that each of its ranks verified.

As a program, this takes the files of a job and of its results, as engine_process.py does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from engine_process import Engine, Result, Run, answered, main, result_of
from forked import ON_EVERY_CORE

UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **ON_EVERY_CORE}
"""vLLM binds each rank to a NUMA node, and there may be fewer nodes than ranks."""

Trace = list[dict[str, Any]]
"""The fields of `TreeStep`, in order of verification."""


@dataclass(frozen=True)
class Ranked:
    """A run's result on rank 0, and the verified trees by rank."""

    result: Result
    traces: list[Trace]


def serve_on_ranks(
    engine: Mapping[str, Any], runs: Mapping[str, Run], ranks: int = 2, **variables: str
) -> dict[str, Ranked]:
    """Start an engine of ``ranks`` ranks and work through the runs. A run's sabotage is in force on
    the last rank alone. ``variables`` extend the environment."""
    arguments = {"tensor_parallel_size": ranks, **engine}
    found = answered(__file__, arguments, runs, threads=1, **UNBOUND | variables)
    return {name: Ranked(result_of(one["result"]), one["traces"]) for name, one in found.items()}


class RankedEngine(Engine):
    """An engine whose workers are processes of their own."""

    runner = None

    def _layout(self) -> str:
        return "of its ranks"

    def trace(self, run: Run) -> Ranked:
        self.llm.collective_rpc("trace_trees", args=(True,))
        result = self.work(run)
        return Ranked(result, self.llm.collective_rpc("take_trace"))

    @contextmanager
    def sabotaged(self, name: str) -> Iterator[None]:
        self.llm.collective_rpc(_break_last_rank, args=(name,))
        yield
        self.llm.collective_rpc(_mend_last_rank)


def _break_last_rank(worker: Any, name: str) -> None:
    import sabotage

    worker.broken = ExitStack()
    # If one rank alone stopped drafting early, the other would wait for it forever.
    growth = worker.model_runner.speculator.drafter.stages._growth
    stock = growth.expand
    goes_on = mock.patch.object(growth, "expand", lambda bits: max(1, stock(bits)))
    worker.broken.enter_context(goes_on)
    if worker.rank == worker.parallel_config.world_size - 1:
        worker.broken.enter_context(getattr(sabotage, name)(worker.model_runner))


def _mend_last_rank(worker: Any) -> None:
    worker.broken.close()


if __name__ == "__main__":
    main(RankedEngine, RankedEngine.trace)
