"""Run a whole measurement, from a grid of loads to a result."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from dyntree_plugin.commands.bench import plan, prompts
from dyntree_plugin.commands.bench.chains import Chains, serves
from dyntree_plugin.commands.bench.measure import measure, served, warm_ups
from dyntree_plugin.commands.bench.plan import Models
from dyntree_plugin.commands.bench.results import Cell, Result, Series
from dyntree_plugin.commands.engine import text_config_of, tokenizer_of
from dyntree_plugin.commands.loads.engine import Around
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import EngineProcess, Pool, Start
from dyntree_plugin.commands.loads.requests import (
    Parameters,
    Request,
    Verify,
    check,
    engine_verifies,
    title,
)
from dyntree_plugin.commands.loads.runs import Engine, Run
from dyntree_plugin.provenance import provenance
from dyntree_plugin.secrets import hidden

Done = Callable[[Engine, Cell, Run], None]


@dataclass(frozen=True)
class Grid:
    """The loads: every set of requests with every sampling, temperature and batch size.

    ``chat``: prompts are messages in the target's chat template.
    """

    sets: Sequence[str]
    temperatures: Sequence[float]
    batches: Sequence[int]
    requests: int
    max_tokens: int
    rounds: int
    seed: int = 0
    samplings: Sequence[Parameters] = ({},)
    chat: bool = False

    @property
    def prompts(self) -> int:
        """Number of prompts per set: as requested, and enough for the largest batch."""
        return max([self.requests, *self.batches])

    def runs(self, engines: Callable[[float], int]) -> int:
        """Return the number of runs. ``engines``: how many are measured at a temperature."""
        cells = len(self.sets) * len(self.samplings) * len(self.batches)
        return self.rounds * cells * sum(map(engines, self.temperatures))

    def loads(self, sets: Mapping[str, Sequence[Request]]) -> dict[Cell, Load]:
        """Return every load by its cell.

        Raises:
            ValueError: if a set has too few prompts for a batch.
        """
        loads = {}
        for (name, requests), sampling, temperature, batch in product(
            sets.items(), self.samplings, self.temperatures, self.batches
        ):
            if len(requests) < batch:
                raise ValueError(
                    f"--batch {batch} needs as many prompts, and {name!r} has {len(requests)}"
                )
            shown = hidden(", ".join(filter(None, [name, title(sampling)])))
            cell = Cell(prompts=shown, temperature=temperature, batch=batch)
            asked = [
                replace(request, sampling={**sampling, **request.sampling})
                for request in requests[: max(self.requests, batch)]
            ]
            loads[cell] = Load(asked, batch, temperature, self.max_tokens, self.seed)
        return loads

    def check(self, sets: Mapping[str, Sequence[Request]], verify: Verify) -> None:
        """Check the sampling parameters of all requests.

        Raises:
            ValueError: if there is a mistake in one, or two of the options have the same name.
        """
        names = [title(sampling) for sampling in self.samplings]
        for name in set(names):
            if names.count(name) > 1:
                raise ValueError(f"--sampling: two have the name {name!r}")
        for sampling in filter(None, self.samplings):
            check(sampling, f"--sampling {json.dumps(sampling)}", self.max_tokens, verify)
        for name, requests in sets.items():
            for key, request in {request.key: request for request in requests}.items():
                source = f"--prompts: the sampling {key} of {name!r}"
                if request.sampling:
                    check(request.sampling, source, self.max_tokens, verify)


@dataclass(frozen=True)
class Extras:
    """What `benchmarks.serve` of the repository adds to a measurement.

    ``labels``: names in the result for models in folders of this machine. ``sets``: requests by the
    names of their sets, which prevail over those of ``--prompts``. ``samplings``: parameters of all
    requests; every set is served with each. ``look_ups``: nodes of trees without a draft.
    ``side_by_side``: engines kept at a time; None: as many as fit. ``around``: makes the context in
    which an engine's process starts the engine. ``starts``: makes, of all engines to be measured,
    what starts one of them, in place of `EngineProcess`. ``seconds_left``: until measurements must
    end.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, Sequence[Request]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    samplings: Sequence[Parameters] = ({},)
    look_ups: Sequence[int] = ()
    side_by_side: int | None = None
    around: Around | None = None
    starts: Callable[[Sequence[Engine]], Start] | None = None
    seconds_left: Callable[[], float] = lambda: math.inf


@dataclass(frozen=True)
class Contest:
    """The engines to compare: vLLM's ``chains``, and ``trees``.

    ``extras.side_by_side`` engines are kept at a time. If that is all of them, they start together,
    and all of them serve a load before the next load.
    """

    models: Models
    chains: Chains
    trees: plan.Trees
    extras: Extras = Extras()

    @cached_property
    def own(self) -> list[Engine]:
        """The engines with the arguments that others do not share, as in `plan.own`."""
        return list(plan.own(self.models, self.chains, self.trees, self.extras.look_ups))

    def engines(self, temperature: float) -> int:
        """Return the number of engines that are measured at a temperature."""
        return sum(serves(engine, temperature) for engine in self.own)


def run(grid: Grid, contest: Contest, notes: Sequence[str], done: Done) -> Iterator[Result]:
    """Measure engines on this machine; yield the result so far after each run.

    Measurements that would exceed the extras' ``seconds_left`` are skipped; the notes of the result
    name them.

    Raises:
        ValueError: if an option, or a model, does not fit.
        RuntimeError: if an engine fails.
    """
    context = text_config_of(contest.models.target).max_position_embeddings
    tokenizer = tokenizer_of(contest.models.target)
    most = context - grid.max_tokens - max(engine.budget for engine in contest.own) - 1
    sets, longer, own = {}, 0, contest.extras.sets
    given = {name: list(own[name][: grid.prompts]) for name in grid.sets if name in own}
    others = [name for name in grid.sets if name not in own]
    given |= prompts.read_all(others, grid.prompts, tokenizer, grid.seed, chat=grid.chat)
    for name, read in given.items():
        sets[name], left_out = prompts.tokens(read, tokenizer, most, chat=grid.chat)
        longer += left_out
        if not sets[name]:
            raise ValueError(
                f"--prompts: no prompt of {name!r} has 1 to {most} tokens, which the target's "
                f"context of {context} leaves beside --max-tokens and the longest chain or tree"
            )
    loads = grid.loads(sets)
    longest = max(len(each.prompt) for one in sets.values() for each in one) + grid.max_tokens
    engines = plan.engines(
        contest.models,
        list(loads),
        longest,
        chains=contest.chains,
        trees=contest.trees,
        look_ups=contest.extras.look_ups,
    )
    grid.check(sets, engine_verifies(engines[0].arguments, tokenizer))
    notes = [
        *notes,
        *(["Prompts are messages in the target's chat template."] if grid.chat else []),
        *([f"{longer} prompts were too long and were left out."] if longer else []),
    ]
    shown = [plan.labelled(engine, contest.models.labels) for engine in engines]
    starts = contest.extras.starts
    start = starts(engines) if starts else partial(EngineProcess, around=contest.extras.around)
    with Pool(contest.extras.side_by_side, start) as pool:
        if together := pool.holds(len(engines)):
            pool.start([(e, warm_ups(list(served(e, loads).values()))) for e in engines])
        measured = measure(
            engines, loads, grid.rounds, pool.engine, done,
            by_cell=together, seconds_left=contest.extras.seconds_left,
        )  # fmt: skip
        yield from _results(grid, shown, loads, measured, notes)


def _results(
    grid: Grid,
    engines: Sequence[Engine],
    cells: Iterable[Cell],
    measured: Iterable[list[Series]],
    notes: Sequence[str],
) -> Iterator[Result]:
    """Yield a result for each list of series."""
    about = [
        f"Medians of {grid.rounds} interleaved rounds ± standard error; ratios are of the times "
        "per token, within each round. Other tokens: those that differ from the first "
        "engine's, at temperature 0.",
        *hidden(notes),
    ]
    shown = [e.model_copy(update={"arguments": hidden(e.arguments)}) for e in engines]
    origin: dict[str, Any] = {}
    for series in measured:
        # The first asks the device, on which the engines have their place by then.
        origin = origin or provenance() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
        yield Result(
            provenance=origin,
            settings=hidden(asdict(grid)),
            notes=[*about, *_missing(grid, engines, cells, series)],
            engines=shown,
            series=series,
        )


def _missing(
    grid: Grid, engines: Sequence[Engine], cells: Iterable[Cell], series: Sequence[Series]
) -> Iterator[str]:
    """If runs are missing, yield a line with the number of complete rounds."""
    runs = {(one.engine, one.cell): len(one.runs) for one in series}
    rounds = {
        cell: min(runs.get((e.name, cell), 0) for e in engines if serves(e, cell.temperature))
        for cell in cells
    }
    if min(rounds.values()) < grid.rounds:
        counts = ", ".join(
            f"{n} at temperature {cell.temperature:g} with batch {cell.batch} ({cell.prompts})"
            for cell, n in rounds.items()
        )
        yield f"Rounds measured, of {grid.rounds}: {counts}."
