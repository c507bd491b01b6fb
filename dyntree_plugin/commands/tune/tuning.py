"""Run the remaining stages of a tuning, and judge the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dyntree_plugin.commands.engine import text_config_of
from dyntree_plugin.commands.tune import check, drafts, heads, learn, models, screen
from dyntree_plugin.commands.tune.prompts import Prompts
from dyntree_plugin.commands.tune.settings import Folder, Settings, write_json
from dyntree_plugin.commands.tune.write import parts, write
from dyntree_plugin.provenance import provenance
from dyntree_plugin.tune.fit import Machine
from dyntree_plugin.tune.shards import Shards


@dataclass(frozen=True)
class Tuning:
    """A run of all stages."""

    console: Console
    folder: Folder
    settings: Settings
    prompts: Prompts
    machine: Machine

    def run(self) -> bool:
        """Run the remaining stages; return whether the result is better.

        Raises:
            ValueError: if the folder, a model or an argument of vLLM does not fit.
            RuntimeError: if an engine fails.
        """
        with self.folder.held():
            if self.folder.begin(self.settings):
                self.console.print("continuing the run in the folder", style="dim")
            for note in self.prompts.notes:
                self.console.print(f"note: {note}", style="yellow")
            lessons = self._lessons()
            self._fit(lessons)
            return self._check()

    def _lessons(self) -> learn.Lessons:
        """Write and teach."""
        every, held_out = parts(self.prompts)
        with screen.stage(self.console, "write", sum(map(len, every))) as update:
            write(self.folder, self.settings, self.prompts, update)
        layers: tuple[int, ...] = ()
        keep: Any = None
        folder, settings = self.folder, self.settings
        if settings.head is not None:
            layers = tuple(heads.config_of(settings).eagle_aux_hidden_state_layer_ids)
            if not folder.of_target.exists():
                keep = partial(heads.keep_of_target, folder)
        elif settings.draft_layers is not None and not models.is_there(folder.begun):
            keep = partial(drafts.keep_of_target, folder, settings, settings.draft_layers)
        with screen.stage(self.console, "teach", len(every)) as update:
            learn.taught(folder, settings, self.machine, len(every), layers, update, keep)
        vocabulary = text_config_of(settings.target).vocab_size
        shards = [folder.shard(part) for part in range(len(every))]
        return learn.Lessons(
            folder,
            learn=Shards(shards[held_out:], vocabulary),
            held_out=Shards(shards[:held_out], vocabulary),
        )

    def _fit(self, lessons: learn.Lessons) -> None:
        texts = lessons.learn
        steps = learn.schedule(self.settings, len(texts)).steps
        self.console.print(
            f"{len(texts)} texts of {texts.positions()} tokens, {steps} steps", style="dim"
        )
        fitted = learn.fitted if self.settings.head is None else heads.fitted
        with screen.stage(self.console, "fit", steps) as update:
            if not models.is_there(self.folder.fitted):
                fitted(lessons, self.settings, self.machine, update)
                self.folder.checkpoint.unlink(missing_ok=True)
        _draw(learn.read_curve(self.folder.losses), self.folder.curve)

    def _check(self) -> bool:
        began = self.settings.draft
        both = ({} if began is None else {"before": began}) | {"after": str(self.folder.fitted)}
        total = len(both) * len(self.settings.nodes) * len(self.settings.temperatures)
        with screen.stage(self.console, "check", total) as update:
            steps = check.measure(self.settings, self.prompts, both, update)
        gain = check.gain(None if began is None else steps["before"], steps["after"])
        self._report(steps, gain)
        self.console.print(screen.steps_table(steps))
        if gain <= 1:
            self.console.print(
                f"Not better: {gain - 1:+.1%} tokens per step in the mean. The result stays in "
                f"{self.folder.work}.",
                soft_wrap=True,
            )
            return False
        shutil.copytree(self.folder.fitted, self.folder.output, dirs_exist_ok=True)
        than = " than without a draft" if began is None else ""
        self.console.print(
            f"Better{than}: {gain - 1:+.1%} tokens per step in the mean. The losses are drawn in "
            f"{self.folder.curve}. To serve it:\n{self._serve()}",
            soft_wrap=True,
        )
        return True

    def _report(self, steps: Mapping[str, check.Steps], gain: float) -> None:
        cells = [
            {"drafts": name, "temperature": place[0], "nodes": place[1], "tokens_per_step": n}
            for name, places in steps.items()
            for place, n in places.items()
        ]
        about = {"provenance": provenance(), "settings": self.settings.as_json()}
        write_json(self.folder.report, about | {"cells": cells, "gain": gain})

    def _serve(self) -> str:
        """Return the command that serves the result."""
        method, draft = self.settings.head or "draft_model", str(self.folder.output)
        speculation = {"method": method, "model": draft, "num_speculative_tokens": 16}
        return (
            f"dyntree serve {self.settings.target} --speculative-config "
            f"'{json.dumps(speculation)}' --dyntree '{{}}'"
        )


def _draw(curve: Mapping[int, tuple[float | None, float]], file: Path) -> None:
    """Write a picture of the losses by step: the mean since the step before, and that of held-out
    texts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    steps = sorted(curve)
    axis.plot(steps, [curve[step][1] for step in steps], label="held out")
    learned = [(step, value) for step in steps if (value := curve[step][0]) is not None]
    if learned:
        axis.plot(*zip(*learned, strict=True), ":", color="C0", label="learned")
    axis.set_xlabel("training steps")
    axis.set_ylabel("loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=150)
