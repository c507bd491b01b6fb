"""The command ``python -m benchmarks.acceptance``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.acceptance import arguments, report
from benchmarks.acceptance.experiment import Laboratory, Pair, Trial
from benchmarks.acceptance.methods import METHODS, Method
from benchmarks.acceptance.models import load
from benchmarks.acceptance.workloads import WORKLOADS, Texts
from dyntree_plugin import pair as embedded
from dyntree_plugin.commands.arguments import Draft, Target, both_or_neither
from dyntree_plugin.provenance import provenance

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Advance = Callable[[dict[str, Any]], dict[str, Any]]
Number = TypeVar("Number", int, float)

OWN = "dyntree's own"
"""What a result calls the embedded models."""


def main(words: Sequence[str]) -> None:
    """Run it with its arguments; ends the process."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    app(list(words), prog_name="python -m benchmarks.acceptance")


@app.command()
def acceptance(
    target: Target = None,
    draft: Draft = None,
    further_draft: arguments.FurtherDrafts = None,
    prompts: arguments.Prompts = 200,
    workload: arguments.Workload = "code",
    prompt_file: arguments.PromptFile = None,
    calibration: arguments.Calibration = 32,
    budgets: arguments.Budgets = "16,64,256,768",
    temperatures: arguments.Temperatures = "0,0.6,1",
    methods: arguments.Methods = None,
    tokens: arguments.Tokens = 64,
    max_depth: arguments.MaxDepth = 24,
    seed: arguments.Seed = 0,
    device: arguments.Device = "cpu",
    dtype: arguments.Dtype = "float32",
    output: arguments.Output = None,
    quick: arguments.Quick = False,
) -> None:
    """Tokens per step of every way to grow a tree, each with a rule it is exact with, on the same
    prompts and without the engine.

    Continuations are short by default: a small greedy target soon repeats itself, and what it
    repeats any draft foretells. An end of text does not end them.
    """
    both_or_neither(target, draft)
    if draft is None and further_draft is None:
        further_draft = [str(embedded.paths()["second_draft"])]
    further = further_draft or []
    if quick:
        prompts, calibration, tokens, budgets = 16, 8, 32, "16,64"
    console = Console(highlight=False)
    try:
        texts = _texts(workload, prompt_file, prompts + calibration)
        warm = _numbers("--temperatures", temperatures, float, 0, 100)
        if texts.given is not None and any(warm):
            raise ValueError(
                f"--temperatures {temperatures}: must be 0 with --workload {workload}, whose texts "
                "are given and not drawn"
            )
        trial = Trial(
            texts.part(slice(prompts)),
            texts.part(slice(prompts, None)),
            _methods(methods, pools=bool(further)),
            _numbers("--budgets", budgets, int, 1, 1024),
            *(warm, tokens, max_depth, seed),
        )
        pair = _pair(target, draft, further, torch.device(device), getattr(torch, dtype))
        result = run(console, pair, trial)
    except (ValueError, OSError) as error:
        print(f"benchmarks.acceptance: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None
    result["settings"] |= {"target": target or OWN, "draft": draft or OWN, "dtype": dtype}
    result["settings"]["further_drafts"] = [OWN] if draft is None else further
    result["settings"]["workload"] = workload if prompt_file is None else prompt_file.name
    result["provenance"] = provenance()
    report.show(console, result)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result) + "\n")
        console.print(f"written: {output}")


def run(console: Console, pair: Pair, trial: Trial) -> dict[str, Any]:
    """Return the result of a trial.

    Raises:
        ValueError: where an option does not fit, before anything is measured.
    """
    laboratory = Laboratory(pair, trial)
    laboratory.check()
    with _progress(console, laboratory.cells) as (describe, advance):
        laboratory.report = describe
        cells = [advance(cell.as_dict()) for cell in laboratory.run()]
    return {
        "settings": {
            "prompts": len(trial.prompts.prompts),
            "calibration": len(trial.calibration.prompts),
            "tokens": trial.tokens,
            "max_depth": trial.max_depth,
            "seed": trial.seed,
        },
        "learned": [
            {
                "temperature": temperature,
                "sequoia_acceptance": lesson.acceptance,
                "values": {name: each.weights.tolist() for name, each in lesson.values.items()},
            }
            for temperature, lesson in laboratory.lessons.items()
        ],
        "posterior": [vars(each) for each in laboratory.posteriors],
        "cells": cells,
    }


def _pair(
    target: str | None,
    draft: str | None,
    further: list[str],
    device: torch.device,
    dtype: torch.dtype,
) -> Pair:
    """All models; the embedded target and draft where none are given."""
    if target is None or draft is None:
        target, draft = embedded.target_and_draft()
    model, *drafts = (load(path, device, dtype) for path in (target, draft, *further))
    wanted, *sizes = (each.config.get_text_config().vocab_size for each in (model, *drafts))
    for path, size in zip((draft, *further), sizes, strict=True):
        if size != wanted:
            raise ValueError(
                f"--target has a vocabulary of {wanted} and draft {path} one of {size}: they must "
                "be the same"
            )
    return Pair(model, drafts, AutoTokenizer.from_pretrained(target))


def _texts(workload: str, file: Path | None, count: int) -> Texts:
    if workload not in WORKLOADS:
        raise ValueError(f"--workload {workload}: must be of {', '.join(WORKLOADS)}")
    if file is None:
        return WORKLOADS[workload](count)
    texts = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            texts.append(str(json.loads(line)["prompt"]))
        except (json.JSONDecodeError, KeyError, TypeError):
            message = f'--prompts {file}, line {number} must be JSON like {{"prompt": "…"}}'
            raise ValueError(message) from None
    if len(texts) < count:
        raise ValueError(
            f"--prompts {file} has {len(texts)} prompts: --num-prompts and --calibration together "
            f"must be at most that, not {count}"
        )
    return Texts(texts[:count])


def _methods(names: str | None, pools: bool) -> list[Method]:
    """Return the methods of these names. ``pools``: there are drafts beside the first."""
    possible = {name: each for name, each in METHODS.items() if pools or each.drafts != "all"}
    chosen = [*possible] if names is None else [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods {', '.join(unknown)}: must be of {', '.join(METHODS)}")
    of_pools = [name for name in chosen if name not in possible]
    if of_pools:
        raise ValueError(f"--methods {', '.join(of_pools)} needs drafts: give --further-draft")
    return [METHODS[name] for name in chosen]


def _numbers(option: str, listed: str, kind: type[Number], low: float, high: float) -> list[Number]:
    try:
        numbers = [kind(part) for part in listed.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if listed and not (numbers and all(low <= number <= high for number in numbers)):
        raise ValueError(f"{option} {listed}: must be numbers from {low:g} to {high:g}, as in 1,2")
    return numbers


@contextmanager
def _progress(console: Console, cells: int) -> Iterator[tuple[Callable[[str], None], Advance]]:
    """How to say what is being done, and that a cell is done."""
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=cells)

        def advance(cell: dict[str, Any]) -> dict[str, Any]:
            progress.advance(task)
            return cell

        yield lambda what: progress.update(task, description=what), advance
