"""Measure everything, in an order that spreads drift evenly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product, zip_longest
from typing import Protocol

from dyntree_plugin.commands.bench.chains import serves
from dyntree_plugin.commands.bench.results import Cell, Series
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.runs import Engine, Run

WARM_UP_TOKENS = 32

Answers = Sequence[Sequence[int]]
"""The tokens of the answer to each request of a load."""


class Server(Protocol):
    def serve(self, load: Load) -> tuple[Run, Answers]: ...


Open = Callable[[Engine, list[Load]], AbstractContextManager[Server]]
"""Returns the running engine; if it has just started, it is warmed up with these loads."""


def measure(
    engines: Sequence[Engine],
    loads: Mapping[Cell, Load],
    rounds: int,
    opened: Open,
    done: Callable[[Engine, Cell, Run], None] = lambda *_: None,
    *,
    by_cell: bool = False,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> Iterator[list[Series]]:
    """Let every engine serve every load in each round, so that drift affects all of them alike.

    Every other round goes backwards, so that the engine that ran last need not start again. After
    each run, yields all results so far, which are kept whatever ends the measurement. With
    ``by_cell``, which needs all engines running, all of them serve a load before the next load
    comes.

    Engines are compared over a group of loads: a whole round, or one load with ``by_cell``. A group
    is skipped if, at the pace of the slowest one, it would exceed ``seconds_left``.
    """
    runs: dict[tuple[str, Cell], list[Run]] = {}
    answers: dict[tuple[str, Cell], Answers] = {}
    groups = [[cell] for cell in loads] if by_cell else [list(loads)]
    slowest = 0.0
    for number in range(rounds):
        for group in groups:
            if runs and seconds_left() < slowest:
                return
            began = time.monotonic()
            for engine in engines if number % 2 == 0 else list(reversed(engines)):
                to_serve = served(engine, loads)
                if to_serve.keys().isdisjoint(group):
                    continue
                with opened(engine, warm_ups(list(to_serve.values()))) as server:
                    for cell in filter(to_serve.__contains__, group):
                        run, answers[engine.name, cell] = server.serve(loads[cell])
                        run = run.model_copy(update={"round": number})
                        # A new list: a yielded one must not grow.
                        runs[engine.name, cell] = [*runs.get((engine.name, cell), ()), run]
                        done(engine, cell, run)
                        yield _all_series(engines, loads, runs, answers)
            slowest = max(slowest, time.monotonic() - began)


def _all_series(
    engines: Sequence[Engine],
    cells: Iterable[Cell],
    runs: Mapping[tuple[str, Cell], list[Run]],
    answers: Mapping[tuple[str, Cell], Answers],
) -> list[Series]:
    """Return the results of the cells that were served."""
    found = []
    for cell, engine in product(cells, engines):
        key = engine.name, cell
        if key in runs:
            wanted = answers[engines[0].name, cell]
            compared = {} if cell.temperature else _compared(answers[key], wanted)
            found.append(Series(engine=engine.name, cell=cell, runs=runs[key], **compared))
    return found


def _compared(answers: Answers, wanted: Answers) -> dict[str, int]:
    """Return by how much answers differ from the first engine's, as fields of a `Series`."""
    pairs = list(zip(answers, wanted, strict=True))
    return {
        "differing_requests": sum(a != b for a, b in pairs),
        # A missing token differs, too.
        "differing_tokens": sum(a != b for pair in pairs for a, b in zip_longest(*pair)),
        "compared_tokens": sum(map(len, wanted)),
    }


def served(engine: Engine, loads: Mapping[Cell, Load]) -> dict[Cell, Load]:
    """Return the loads for an engine."""
    return {cell: load for cell, load in loads.items() if serves(engine, cell.temperature)}


def warm_ups(loads: Sequence[Load]) -> list[Load]:
    """Return one short load for each concurrency, temperature and kind of requests of the loads.

    It has a request of every kind, so that no grammar is compiled in a measurement.
    """
    short = {}
    for load in loads:
        first = load.requests[: load.concurrency]
        kinds = {request.key: request for request in load.requests}
        further = [kinds[key] for key in kinds.keys() - {request.key for request in first}]
        short[load.concurrency, load.temperature, frozenset(kinds)] = replace(
            load,
            requests=[*first, *further],
            max_tokens=min(load.max_tokens, WARM_UP_TOKENS),
        )
    return list(short.values())
