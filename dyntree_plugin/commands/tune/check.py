"""Stage 4, check: measure tokens per step before and after, on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import geometric_mean

from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import Pool
from dyntree_plugin.commands.loads.runs import Engine
from dyntree_plugin.commands.tune import engines, heads
from dyntree_plugin.commands.tune.learn import Lessons
from dyntree_plugin.commands.tune.models import folder_of, reader_of
from dyntree_plugin.commands.tune.prompts import Prompts
from dyntree_plugin.commands.tune.settings import Settings
from dyntree_plugin.tune import unknown as unknown_of
from dyntree_plugin.tune.eagle import load_head
from dyntree_plugin.tune.fit import Machine
from dyntree_plugin.tune.posterior import Posterior
from dyntree_plugin.tune.unknown import Logits

Place = tuple[float, int]
"""A temperature, and a number of nodes."""

Drafts = Mapping[str, str]
"""The draft of each engine, by shown name."""

Steps = Mapping[Place, float]
"""Tokens per step at each temperature and number of nodes."""


def measure(
    settings: Settings, prompts: Prompts, drafts: Drafts, advance: Callable[[], None]
) -> dict[str, dict[Place, float]]:
    """Let every engine complete the held-out prompts at every temperature.

    Raises:
        RuntimeError: if an engine fails, or does not count its steps.
    """
    steps: dict[str, dict[Place, float]] = {name: {} for name in drafts}
    for nodes in settings.nodes:
        for name, draft in drafts.items():
            engine = engines.drafting(settings, name, draft, nodes, prompts.longest)
            of_engine = _of_engine(settings, prompts, engine, advance)
            steps[name] |= {(temperature, nodes): n for temperature, n in of_engine.items()}
    return steps


def _of_engine(
    settings: Settings, prompts: Prompts, engine: Engine, advance: Callable[[], None]
) -> dict[float, float]:
    steps = {}
    with Pool(places=1) as pool, pool.engine(engine, []) as process:
        for temperature in settings.temperatures:
            run, _ = process.serve(_load(settings, prompts, temperature))
            if not run.request_steps:
                raise RuntimeError(f"the engine `{engine.name}` has not counted its steps")
            steps[temperature] = (run.output_tokens - run.requests) / run.request_steps
            advance()
    return steps


def _load(settings: Settings, prompts: Prompts, temperature: float) -> Load:
    at = replace(settings, temperatures=[temperature])
    return engines.load(at, prompts.held_out, 0)


def unknown(
    lessons: Lessons,
    settings: Settings,
    machine: Machine,
    drafts: Drafts,
    advance: Callable[[], None],
) -> dict[str, Mapping[float, Posterior]]:
    """Return what each draft leaves unknown of the held-out texts, by temperature."""
    shards = lessons.held_out()
    texts = lessons.held_out_texts()
    found = {}
    for name, draft in drafts.items():
        logits = _logits(lessons, settings, machine, draft)
        found[name] = unknown_of.posteriors(logits, shards, texts, machine.main)
        advance()
    return found


def _logits(lessons: Lessons, settings: Settings, machine: Machine, model: str) -> Logits:
    if settings.head is None:
        return unknown_of.of_draft(reader_of(folder_of(model), machine))
    embedding = heads.kept_of_target(lessons.folder).embedding.float()
    head = load_head(folder_of(model)).to(machine.main)
    return unknown_of.of_head(head, embedding.to(machine.main))


def gain(before: Steps | None, after: Steps) -> float:
    """Return the mean ratio of tokens per step; a step without speculation makes one."""
    return geometric_mean(n / (1.0 if before is None else before[at]) for at, n in after.items())
