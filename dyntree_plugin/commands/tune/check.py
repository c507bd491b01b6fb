"""Stage 4, check: measure tokens per step before and after, on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from statistics import geometric_mean

from dyntree_plugin.commands.loads.pool import Pool
from dyntree_plugin.commands.tune import engines
from dyntree_plugin.commands.tune.prompts import Prompts
from dyntree_plugin.commands.tune.settings import Settings, Update

Place = tuple[float, int]
"""A temperature, and a number of nodes."""

Drafts = Mapping[str, str]
"""The draft of each engine, by shown name."""

Steps = Mapping[Place, float]
"""Tokens per step at each temperature and number of nodes."""


def measure(
    settings: Settings, prompts: Prompts, drafts: Drafts, update: Update
) -> dict[str, dict[Place, float]]:
    """Let every engine complete the held-out prompts at every temperature.

    Raises:
        RuntimeError: if an engine fails, or does not count its steps.
    """
    steps: dict[str, dict[Place, float]] = {name: {} for name in drafts}
    for nodes, (name, draft) in product(settings.nodes, drafts.items()):
        engine = engines.drafting(settings, name, draft, nodes, prompts.longest)
        with Pool(places=1) as pool, pool.engine(engine) as process:
            for temperature in settings.temperatures:
                at = replace(settings, temperatures=[temperature])
                run, _ = process.serve(engines.load(at, prompts.held_out, 0))
                if not run.request_steps:
                    raise RuntimeError(f"the engine `{engine.name}` has not counted its steps")
                tokens = run.output_tokens - run.requests
                steps[name][temperature, nodes] = tokens / run.request_steps
                update(advance=1)
    return steps


def gain(before: Steps | None, after: Steps) -> float:
    """Return the mean ratio of tokens per step; a step without speculation makes one."""
    return geometric_mean(n / (1.0 if before is None else before[at]) for at, n in after.items())
