"""The command ``dyntree bench serve``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dyntree_plugin import pair
from dyntree_plugin.commands.arguments import (
    KINDS,
    Draft,
    Target,
    both_or_neither,
    check_models,
    embedded,
)
from dyntree_plugin.commands.bench import arguments, overview, plan, prompts, session, terminal
from dyntree_plugin.commands.bench.chains import chosen
from dyntree_plugin.commands.bench.plan import Models
from dyntree_plugin.commands.bench.results import Cell, Result, write
from dyntree_plugin.commands.bench.session import Contest, Done, Extras, Grid
from dyntree_plugin.commands.bench.table import NONE
from dyntree_plugin.commands.ending import Ended, ends_by_signals
from dyntree_plugin.commands.loads.runs import Engine, Run
from dyntree_plugin.commands.paths import check_new_file
from dyntree_plugin.commands.start import ready_for_engine
from dyntree_plugin.escape import escaped_lines
from dyntree_plugin.options.methods import WITHOUT_DRAFT
from dyntree_plugin.secrets import hidden
from dyntree_plugin.strict_json import object_of


@ends_by_signals()
def serve(
    context: typer.Context,
    target: Target = None,
    draft: Draft = None,
    method: arguments.Method = "draft_model",
    prompt_sets: arguments.PromptSets = None,
    chat: arguments.Chat = False,
    count: arguments.NumPrompts = 8,
    max_tokens: arguments.MaxTokens = 64,
    batches: arguments.Batches = None,
    temperatures: arguments.Temperatures = None,
    chains: arguments.Chains = None,
    trees: arguments.Trees = None,
    rounds: arguments.Rounds = 2,
    engine_arguments: arguments.EngineArguments = "{}",
    result_file: arguments.ResultFile = None,
) -> None:
    """Compare the speed of no speculation, vLLM's chains and trees.

    Every engine serves every load in every round, so that drift affects all of them alike. Without
    --target and --draft, the command uses the pair of tiny models that comes with dyntree.

    Without options this is a first answer: 48 runs of 8 prompts with 64 tokens, in each of 2
    rounds, with 2 batch sizes, 5 engines at temperature 0 and 7 at 1. They take about 15,000 times
    the target's time per token, 5 minutes at 20 ms, and the starts of engines: 7, or 13 on a GPU,
    which holds one at a time.

    `--chain all --rounds 3 --max-tokens 128` asks for more: 192 runs of 21 engines, with many
    lengths of every kind of chains. `--rounds 1 --chain 5` leaves 12 runs of 3 engines, and
    `--method ngram` measures look-up alone.
    """
    extras = context.obj if isinstance(context.obj, Extras) else Extras()
    console = Console(highlight=False)
    temperatures = list(dict.fromkeys(temperatures or arguments.TEMPERATURES))
    batches = list(dict.fromkeys(batches or arguments.BATCHES))
    loads = prompt_sets or [prompts.CODE], temperatures, batches
    result: Result | None = None
    status = 0
    try:
        grid = Grid(*loads, count, max_tokens, rounds, samplings=extras.samplings, chat=chat)
        check_new_file("--output", result_file)
        ready_for_engine()
        further = object_of("--engine-arguments", engine_arguments)
        drafts = method not in WITHOUT_DRAFT
        of_trees = _trees(trees, draft=drafts)
        pieces = plan.reads_in_pieces(further) and _on_cpu()
        lengths, left_out = chosen(chains, temperatures, draft=drafts, pieces=pieces)
        models, remarks = _models(target, draft, method, further)
        if extras.labels:
            models = replace(models, labels=extras.labels)
        contest = Contest(models, lengths, of_trees, extras)
        notes = [*remarks, *left_out, *extras.notes]
        with _progress(console, grid.runs(contest.engines)) as done:
            for result in session.run(grid, contest, notes, done):
                if result_file is not None:
                    write(result, result_file)
    except Ended as ended:
        _tell("interrupted")
        status = ended.code
    except (ValueError, OSError, RuntimeError) as error:
        _tell(escaped_lines(hidden(str(error))))
        status = 1 if isinstance(error, RuntimeError) else 2
    if result is not None:
        _show(console, result)
    raise typer.Exit(status)


def _tell(message: str) -> None:
    print(f"dyntree bench serve: {message}", file=sys.stderr)  # noqa: T201


def _show(console: Console, result: Result) -> None:
    terminal.show(console, result)
    if len(list(result.cells())) > 1:
        overview.show(console, result)


def _models(
    target: str | None,
    draft: str | None,
    method: arguments.Source,
    further: dict[str, Any],
) -> tuple[Models, list[str]]:
    """Return the models, and notes on them."""
    from transformers.utils import logging

    if method != "ngram":
        if target is not None and draft is None and method != "mtp":
            raise ValueError(
                "--target and --draft go together; --method ngram needs no draft, and measures "
                "look-up alone"
            )
        both_or_neither(target, draft, method)
    elif draft is not None:
        raise ValueError("--draft must not be given: --method ngram measures look-up alone")
    check_models(target, draft)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if target is not None:
        return Models(target, draft, further, method=method), []
    labels = {str(path): f"the embedded {n.replace('_', ' ')}" for n, path in pair.paths().items()}
    if method == "ngram":
        notes = [f"The embedded target, {further.get('dtype', 'bfloat16')}, and look-up alone."]
        return Models(str(pair.paths()["target"]), None, further, labels, method), notes
    folder, drafting = embedded(method)
    labels[str(drafting)] = f"the embedded {KINDS[method]}"
    what = "pair" if method == "draft_model" else f"target and its {KINDS[method]}"
    notes = [f"The embedded {what}, {further.get('dtype', 'bfloat16')}."]
    return Models(str(folder), str(drafting), further, labels, method), notes


def _on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _trees(given: Sequence[str] | None, *, draft: bool) -> plan.Trees:
    options = [object_of("--dyntree", one) for one in given or ()] or arguments.TREES
    return plan.named_trees(options, arguments.NODES, draft=draft)


@contextmanager
def _progress(console: Console, runs: int) -> Iterator[Done]:
    """Show the result of each run above a progress bar."""
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=runs)

        def done(engine: Engine, cell: Cell, run: Run) -> None:
            bar.advance(task)
            time_per_token = f"{run.tpot_ms:.2f}" if run.tpot_ms else NONE
            bar.console.print(
                f"round {run.round + 1}  {engine.name:<25} {cell.title}: "
                f"{time_per_token} ms per token",
                style="dim",
                soft_wrap=True,
            )

        yield done
