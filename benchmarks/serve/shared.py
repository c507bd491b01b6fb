"""Engines that share a process: one for vLLM's chains of every length, one for trees of every size.

The scheduler asks a table for the draft tokens of a step, and graphs of all of them are captured.
Each load names one, so three engines start where there were twelve.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from dyntree_plugin.commands.bench.chains import kind_of
from dyntree_plugin.commands.bench.results import read
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import EngineProcess, Start
from dyntree_plugin.commands.loads.runs import Engine, Run
from dyntree_plugin.options.options import NAMESPACE

WORKER = "benchmarks.serve.at_rates.MeasuredWorker"
"""Its module changes vLLM's classes, so that nothing but an engine's process imports it."""
LENGTHS = Path(__file__).parents[1] / "results" / "tokens-eagle3.json"
"""Tokens per step of chains and trees of the embedded EAGLE-3 head, greedy, of code."""
_OF_SIZE = ("node_budget", "budget", "max_depth")
_LEVELS = 8
"""Levels of a tree over which its acceptance is spread."""


def arguments_of(engine: Engine, engines: Sequence[Engine]) -> dict[str, Any]:
    """Return the arguments of the process that serves ``engine`` and others of ``engines``.

    They are equal for chains that differ in length, and for trees that differ in nodes.
    """
    arguments = {**engine.arguments, "worker_extension_cls": WORKER}
    family = [each for each in engines if _family(each) == _family(engine)]
    lengths = sorted({each.budget for each in family}, reverse=True)
    speculation = dict(arguments.get("speculative_config", {}))
    if not speculation:
        return arguments
    speculation["num_speculative_tokens"] = lengths[0]
    if NAMESPACE in arguments.get("additional_config", {}):
        largest = max(family, key=lambda each: each.budget)
        own = {**largest.arguments["additional_config"][NAMESPACE], "node_budget": lengths[0]}
        if len({(each.budget, told(each)[0]) for each in family}) > 1:
            own.pop("budget", None)  # Graphs of all sizes are captured if the budget is adaptive.
        arguments["additional_config"] = {NAMESPACE: own}
    else:
        rates = marginal(chain_rates(lengths[0]))
        speculation |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
            "num_speculative_tokens_per_batch_size": [
                (number, number, length) for number, length in enumerate(lengths, start=1)
            ],
        }
    arguments["speculative_config"] = speculation
    return arguments


def _family(engine: Engine) -> tuple[str, ...]:
    if engine.kind == "chain":
        return engine.kind, kind_of(engine)
    options = dict(engine.arguments.get("additional_config", {}).get(NAMESPACE, {}))
    for name in _OF_SIZE:
        options.pop(name, None)
    return engine.kind, json.dumps(options, sort_keys=True)


def told(engine: Engine) -> tuple[int | None, list[float] | None]:
    """Return the draft tokens of the engine's steps, None if it chooses them, and its rates."""
    if engine.kind == "plain":
        return None, None
    if engine.kind == "chain":
        return engine.budget, chain_rates(engine.budget)
    options = engine.arguments["additional_config"][NAMESPACE]
    fixed = options.get("budget") == "fixed"
    return engine.budget if fixed else None, tree_rates(engine.budget)


@cache
def _known() -> Mapping[str, list[tuple[int, float]]]:
    """Tokens per step by draft tokens, for chains and for trees without look-up."""
    result = read(LENGTHS)
    found: dict[str, list[tuple[int, float]]] = {"chain": [(0, 1.0)], "tree": [(0, 1.0)]}
    for series in result.series:
        engine, counts = result.engine(series.engine), series.runs[0].speculation
        tokens = 1 + counts.accepted_tokens / max(1, counts.drafts)
        if series.cell.temperature == 0 and engine.kind == "chain":
            found["chain"].append((engine.budget, tokens))
        elif series.cell.temperature == 0 and engine.name.endswith("lookup off"):
            found["tree"].append((engine.budget, tokens))
    found["tree"].append((1, dict(found["chain"])[1]))
    return {kind: sorted(dict(points).items()) for kind, points in found.items()}


def tokens_per_step(kind: str, drafts: int) -> float:
    """Return the tokens per step of a "chain" or "tree" with so many draft tokens.

    Between those that were measured it follows the logarithm of the rows.
    """
    points = _known()[kind]
    for (below, low), (above, high) in pairwise(points):
        if drafts <= above:
            share = math.log((1 + drafts) / (1 + below)) / math.log((1 + above) / (1 + below))
            return low + share * (high - low)
    return points[-1][1]


def chain_rates(length: int) -> list[float]:
    """Return the chance of each of a chain's drafts to be accepted if those before it are."""
    means = [tokens_per_step("chain", drafts) for drafts in range(length + 1)]
    gained = [1.0, *(after - before for before, after in pairwise(means))]
    return [min(1.0, after / before) for before, after in pairwise(gained)]


def tree_rates(nodes: int) -> list[float]:
    """Return the same by levels of a tree: one chance at all of them, which gives its mean."""
    wanted, levels = tokens_per_step("tree", nodes), min(nodes, _LEVELS)
    low, high = 0.0, 1.0
    for _ in range(40):
        chance = (low + high) / 2
        mean = sum(chance**level for level in range(levels + 1))
        low, high = (chance, high) if mean < wanted else (low, chance)
    return [high] * levels


def marginal(rates: Sequence[float]) -> list[float]:
    """Return the chances that so many drafts are accepted, as vLLM's configuration has them."""
    return [math.prod(rates[: length + 1]) for length in range(len(rates))]


class _View(EngineProcess):
    """An engine of several in a process. The first one starts it, and ends it."""

    def __init__(
        self, engine: Engine, told: Any, log: Path, processes: dict[str, EngineProcess]
    ) -> None:
        self._told = told
        key = json.dumps(engine.arguments, sort_keys=True)
        self._starts = key not in processes
        if self._starts:
            processes[key] = EngineProcess(engine, log)
        self._shared = processes[key]

    def wait(self) -> None:
        if self._starts:
            self._shared.wait()

    def serve(self, load: Load) -> tuple[Run, Any]:
        return self._shared.serve(replace(load, told=load.told or self._told))

    def resident_bytes(self) -> int:
        return self._shared.resident_bytes()

    def end(self) -> None:
        if self._starts:
            self._shared.end()


def starts(engines: Sequence[Engine]) -> Start:
    """Return what starts each of these engines, in a process that others share."""
    processes: dict[str, EngineProcess] = {}

    def start(engine: Engine, log: Path) -> EngineProcess:
        own = engine.model_copy(update={"arguments": arguments_of(engine, engines)})
        return _View(own, told(engine), log, processes)

    return start
