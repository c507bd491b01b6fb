"""The command ``dyntree tune``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from transformers.utils import logging

from dyntree_plugin.admission import reasons
from dyntree_plugin.commands.tune import arguments, check, learn, models, picture, prompts, screen
from dyntree_plugin.commands.tune.prompts import Prompts
from dyntree_plugin.commands.tune.settings import Folder, Settings, write_json
from dyntree_plugin.commands.tune.write import parts, write
from dyntree_plugin.provenance import provenance
from dyntree_plugin.strict_json import from_json
from dyntree_plugin.tune.fit import Machine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

TEMPERATURES = (0.0, 0.6, 1.0)
RATE, RATE_OF_ADAPTERS = 1e-3, 2e-3
NODES = (16,)


def main(words: Sequence[str]) -> None:
    """Run it with its arguments; ends the process.

    Exit status: 0 if the result is better than what it began with, 1 if not, 2 if the arguments,
    the prompts or the models are refused.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    app(list(words), prog_name="dyntree tune")


@app.command()
def tune(
    target: arguments.Target,
    draft: arguments.Draft = None,
    *,
    prompt_file: arguments.PromptFile,
    output: arguments.Output,
    head: arguments.Head = None,
    adapter: arguments.Adapter = None,
    pool: arguments.Pool = 1,
    boost: arguments.Boost = "positions",
    temperatures: arguments.Temperatures = None,
    tokens: arguments.Tokens = 256,
    epochs: arguments.Epochs = 2.0,
    rows: arguments.Rows = 8,
    rate: arguments.Rate = None,
    held_out: arguments.HeldOut = 64,
    nodes: arguments.Nodes = None,
    batch: arguments.Batch = 64,
    chat: arguments.Chat = False,
    dtype: arguments.Dtype = "auto",
    seed: arguments.Seed = 0,
    engine_arguments: arguments.EngineArguments = "{}",
) -> None:
    """Fit a draft, a pool of drafts, or an EAGLE-3 head to its target, on prompts such as users
    send.

    The target continues the prompts in vLLM (write), reads the texts once and keeps its
    probabilities (teach), the draft learns them (fit), and trees on prompts that were held out show
    what it is worth (check). A run that was stopped goes on where it was: give the same command
    again.
    """
    settings = Settings(
        target, draft, head, adapter, pool, boost, list(temperatures or TEMPERATURES), tokens,
        epochs, rows, rate or (RATE if adapter is None else RATE_OF_ADAPTERS), held_out,
        list(nodes or NODES), batch, dtype, seed,
    )  # fmt: skip
    console = Console(highlight=False)
    with reasons.exit_on_mistake("dyntree tune"):
        _check_packages(settings)
        given = _engine_arguments(engine_arguments)
        settings = replace(settings, engine_arguments=given)
        found = _prompts(settings, prompt_file, chat=chat)
        settings = replace(settings, digest=found.digest)
        tuning = Tuning(console, Folder(output), settings, found, Machine.present())
        better = _run(tuning)
    raise typer.Exit(0 if better else 1)


def _run(tuning: Tuning) -> bool:
    try:
        return tuning.run()
    except KeyboardInterrupt:
        tuning.console.print("Stopped. The same command goes on from here.")
        raise typer.Exit(130) from None
    except RuntimeError as error:
        print(f"dyntree tune: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None


def _check_packages(settings: Settings) -> None:
    wanted = ["matplotlib", *(["peft"] if settings.adapter is not None else [])]
    wanted += ["accelerate"] if Machine.present().devices is not None else []
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ValueError(f"tune needs {', '.join(missing)}: pip install 'dyntree[tune]'")


def _engine_arguments(given: str) -> dict[str, object]:
    try:
        found = from_json(given)
    except ValueError as error:
        raise ValueError(f"--engine-arguments {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--engine-arguments {given!r} must be a JSON object")
    return found


def _prompts(settings: Settings, file: Path, *, chat: bool) -> Prompts:
    """Read the prompts, and check what can be checked without weights."""
    if settings.draft is None:
        raise ValueError("DRAFT is missing: give the draft model to begin with")
    models.check(settings.target, settings.draft)
    context = min(models.context_of(settings.target), models.context_of(settings.draft))
    most = context - settings.tokens - max(settings.nodes) - 1
    tokenizer = models.tokenizer_of(settings.target)
    return prompts.read(file, tokenizer, most, settings.held_out, settings.seed, chat=chat)


@dataclass(frozen=True)
class Tuning:
    """A run of all stages."""

    console: Console
    folder: Folder
    settings: Settings
    prompts: Prompts
    machine: Machine

    def run(self) -> bool:
        """Run the stages that are left; return whether the result is better."""
        going_on = self.folder.begin(self.settings)
        for note in self.prompts.notes:
            self.console.print(f"note: {note}", style="yellow")
        if going_on:
            self.console.print("going on with the run that is in the folder", style="dim")
        every, held_out = parts(self.prompts)
        with screen.stage(self.console, "write", sum(map(len, every))) as update:
            write(self.folder, self.settings, self.prompts, _counted(update))
        with screen.stage(self.console, "teach", len(every)) as update:
            learn.taught(self.folder, self.settings, self.machine, len(every), (), _counted(update))
        lessons = learn.Lessons(self.folder, len(every), held_out)
        self._fit(lessons)
        return self._check()

    def _fit(self, lessons: learn.Lessons) -> None:
        shards = lessons.learn()
        steps = learn.schedule(self.settings, len(shards)).steps
        self.console.print(
            f"{len(shards)} texts of {shards.positions()} tokens, {steps} steps per draft",
            style="dim",
        )
        for member in self._members:
            name = "fit" if self.settings.pool == 1 else f"fit {member}"
            with screen.stage(self.console, name, steps) as update:
                learn.fitted(lessons, self.settings, self.machine, member, update)
        curves = {
            f"draft {member}": learn.read_curve(self.folder.losses(member))
            for member in self._members
        }
        picture.draw(curves, self.folder.curve)

    def _check(self) -> bool:
        made = [str(self.folder.fitted(member)) for member in self._members]
        drafts = {"before": [str(self.settings.draft)], "after": made[:1]}
        if len(made) > 1:
            drafts["pool"] = made
        total = len(drafts) * len(self.settings.nodes) * len(self.settings.temperatures)
        with screen.stage(self.console, "check", total) as update:
            found = check.measure(self.settings, self.prompts, drafts, _counted(update))
        before, *_, result = found.values()
        gain = check.gain(before, result)
        self._report(found, gain)
        self.console.print(screen.steps_table(found))
        if gain <= 1:
            self.console.print(
                f"The result is not better ({gain - 1:+.1%} tokens per step in the mean), so it "
                f"stays in {self.folder.fitted(1)}."
            )
            return False
        self._place()
        self.console.print(
            f"{gain - 1:+.1%} tokens per step in the mean. The losses are drawn in "
            f"{self.folder.curve}. To serve it:\n{self._serve()}",
            soft_wrap=True,
        )
        return True

    @property
    def _members(self) -> range:
        return range(1, self.settings.pool + 1)

    def _report(self, found: dict[str, dict[check.Place, float]], gain: float) -> None:
        cells = [
            {"drafts": name, "temperature": place[0], "nodes": place[1], "tokens_per_step": n}
            for name, places in found.items()
            for place, n in places.items()
        ]
        write_json(
            self.folder.report,
            {
                "provenance": provenance(),
                "settings": asdict(self.settings),
                "cells": cells,
                "gain": gain,
            },
        )

    def _place(self) -> None:
        """Copy the result to where it belongs."""
        for member in self._members:
            shutil.copytree(
                self.folder.fitted(member),
                self.folder.result(member, self.settings.pool),
                dirs_exist_ok=True,
            )

    def _serve(self) -> str:
        first, *others = (str(self.folder.result(n, self.settings.pool)) for n in self._members)
        speculation = {"method": "draft_model", "model": first, "num_speculative_tokens": 16}
        options = {"drafts": others} if others else {}
        return (
            f"dyntree serve {self.settings.target} --speculative-config "
            f"'{json.dumps(speculation)}' --dyntree '{json.dumps(options)}'"
        )


def _counted(update: screen.Update) -> Advance:
    return Advance(update)


class Advance:
    """Counts what is done, and shows it."""

    def __init__(self, update: screen.Update) -> None:
        self._update = update
        self._done = 0

    def __call__(self, more: int = 1) -> None:
        self._done += more
        self._update(self._done, "")
