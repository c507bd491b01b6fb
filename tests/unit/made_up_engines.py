"""Engines for tests of the commands that measure: they answer at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.runs import Engine, Run


def answered(load: Load, answer: Sequence[int] = (1,)) -> tuple[Run, list[list[int]]]:
    """Return what an engine returns that gives every request the same answer."""
    run = Run(round=0, requests=1, seconds=1.0, output_tokens=9, tpot_ms=1.0, ttft_ms=1.0)
    return run, [[*answer] for _ in load.requests]


class FakePool:
    """Takes the place of the pool of engines, and of every engine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def holds(self, engines: int) -> bool:
        return False

    @contextmanager
    def engine(self, engine: Engine, warm_up: Sequence[Load] = ()) -> Iterator[Self]:
        yield self

    def serve(self, load: Load) -> tuple[Any, Any]:
        return answered(load)
