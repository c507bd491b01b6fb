"""An engine on the CPU whose scheduler chooses draft forwards and nodes before it sees a tree.

An engine on CUDA works like this. As a program, this takes the files of a job and of its results,
as engine_process.py does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from engine_process import Engine, Result, Run, answered, main, result_of
from grammars import asynchronous_scheduling


@dataclass(frozen=True)
class Chosen:
    """The result of a run, and the chosen numbers of draft forwards and nodes, by step."""

    result: Result
    choices: list[tuple[int, int]]


def serve_asynchronously(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Chosen]:
    """Start an engine and work through the runs; "every_choice" is a sabotage of this file."""
    found = answered(__file__, engine, runs, threads=1)
    return {
        name: Chosen(result_of(one["result"]), [(f, n) for f, n in one["choices"]])
        for name, one in found.items()
    }


@contextmanager
def every_choice(buckets: Any) -> Iterator[None]:
    """Choose every number of forwards and of nodes in turn. Output must not change."""
    from dyntree_plugin.tree.budget.learned import Chosen

    turns = zip(
        itertools.cycle(range(1 + buckets.forwards)), itertools.cycle(buckets.sizes), strict=False
    )
    choices = (Chosen(*turn) for turn in turns)
    with mock.patch.object(buckets, "_choose", side_effect=choices):
        yield


def work(engine: Engine, run: Run) -> Chosen:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    buckets, choices = scheduler._buckets, list[tuple[int, int]]()
    stock = type(buckets).__getitem__

    def noted(self: Any, requests: int) -> int:
        nodes: int = stock(self, requests)
        choices.append((self.forwards, nodes))
        return nodes

    forced = nullcontext() if run.sabotage is None else every_choice(buckets)
    run = replace(run, sabotage=None)
    with mock.patch.object(type(buckets), "__getitem__", noted), forced:
        return Chosen(engine.work(run), choices)


if __name__ == "__main__":
    with asynchronous_scheduling():
        main(work=work)
