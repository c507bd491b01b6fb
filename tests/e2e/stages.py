"""A pipeline whose stages are processes of their own, and ways to break one of them.

As a program, this takes the files of a job and of its results, as engine_process.py does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from engine_process import Engine, Result, Run, answered, main, result_of
from ranks import UNBOUND
from sabotage_of_states import (  # noqa: F401
    commit_of_another_forward,
    commit_of_the_latest_forward,
)

BROKEN = ("without_paths_of_earlier_stages", "without_trees_of_earlier_stages")


def serve_in_stages(
    engine: Mapping[str, Any],
    runs: Mapping[str, Run],
    stages: int = 2,
    program: str = __file__,
    **variables: str,
) -> dict[str, Result]:
    """Start an engine of so many stages and work through the runs; a run's sabotage is in force on
    every worker but the last. ``variables`` extend the environment."""
    arguments = {"pipeline_parallel_size": stages, **engine}
    found = answered(program, arguments, runs, threads=1, **UNBOUND | variables)
    return {name: result_of(one) for name, one in found.items()}


@contextmanager
def without_paths_of_earlier_stages(runner: Any) -> Iterator[None]:
    """Lose the accepted paths on their way: no KV is moved."""
    stock = runner.follow

    def follow(decided: Any) -> None:
        stock(replace(decided, path=decided.path.fill_(-1)))

    with mock.patch.object(runner, "follow", follow):
        yield


@contextmanager
def without_trees_of_earlier_stages(runner: Any) -> Iterator[None]:
    """Lose the trees on their way: nodes are placed as in the tree that was there before."""
    with mock.patch.object(runner.trees, "put_places"):
        yield


class StagedEngine(Engine):
    """An engine whose workers are processes of their own."""

    runner = None

    def _layout(self) -> str:
        return "of its stages"

    @contextmanager
    def sabotaged(self, name: str) -> Iterator[None]:
        self.llm.collective_rpc(_break, args=(name,))
        yield
        self.llm.collective_rpc(_mend)


def _break(worker: Any, name: str) -> None:
    import sabotage
    import stages

    worker.broken = ExitStack()
    if worker.rank < worker.parallel_config.world_size - 1:
        broken = getattr(stages, name, None) or getattr(sabotage, name)
        worker.broken.enter_context(broken(worker.model_runner))


def _mend(worker: Any) -> None:
    worker.broken.close()


if __name__ == "__main__":
    main(StagedEngine)
