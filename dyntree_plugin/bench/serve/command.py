"""The command ``dyntree bench serve``."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging

from dyntree_plugin import pair
from dyntree_plugin.bench.serve import overview, plan, plots, prompts, table
from dyntree_plugin.bench.serve.plan import Models
from dyntree_plugin.bench.serve.results import Cell, Engine, Result, Run, write
from dyntree_plugin.bench.serve.session import Contest, Done, Settings, of_engines, of_servers

_TREES: list[dict[str, Any]] = [{"node_budget": 16}, {"node_budget": 16, "budget": "fixed"}]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str]) -> None:
    """Run it with the arguments behind ``dyntree bench serve``; ends the process."""
    app(list(arguments), prog_name="dyntree bench serve")


@app.command()
def serve(
    target: Annotated[str | None, typer.Option(help="Target model: a folder or a name.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model of the same vocabulary.")] = None,
    target_shape: Annotated[
        str | None,
        typer.Option(help="Grow the embedded target to the cost of llama-1b, llama-3b, llama-8b."),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "bfloat16",
    prompt_sets: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            metavar="SET",
            help="'code' (held-out Python), a JSONL file, or 'vllm:' and flags of vLLM's data "
            "sets. Repeatable.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts of a set.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="Repeatable.")] = None,
    chain: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of a chain of vLLM's. Repeatable.")
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON",
            help="dyntree options of an engine with trees, by default "
            f"{' and '.join(map(json.dumps, _TREES))}. Repeatable.",
        ),
    ] = None,
    static_trees: Annotated[
        bool,
        typer.Option(
            "--static/--no-static",
            help="Add the best static tree of each budget; it takes both models in fp32 to find.",
        ),
    ] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    side_by_side: Annotated[
        int | None, typer.Option(min=1, help="Engines kept at a time; by default what fits.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="From the command's start: what would not end by then is left out, and named. "
            "What is measured first is not.",
        ),
    ] = None,
    note: Annotated[
        list[str] | None, typer.Option(help="A line for the result's notes. Repeatable.")
    ] = None,
    engine_arguments: Annotated[
        str, typer.Option(metavar="JSON", help="Further arguments of every engine's LLM().")
    ] = "{}",
    base_url: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="Measure this running server instead. Repeatable."),
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="What servers are asked.")
    ] = "completions",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    plot_folder: Annotated[
        Path | None, typer.Option("--plots", help="Write pictures into this folder.")
    ] = None,
) -> None:
    """Compares no speculation, vLLM's chains, and static and dynamic trees in one run.

    Every engine serves every load in every round, so that drift hits all alike. Without a target
    and a draft it takes the embedded pair.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    console = Console(highlight=False)
    end = math.inf if time_limit is None else time.monotonic() + time_limit
    settings = Settings(
        prompt_sets or [prompts.CODE], temperature or [0.0], batch or [1, 4],
        requests, max_tokens, rounds, seed,
    )  # fmt: skip
    try:
        if base_url:
            if target or draft or target_shape or chain or tree:
                raise ValueError("--base-url measures what is served there: give no models")
            with _progress(console, settings, len(base_url)) as done:
                results = of_servers(settings, base_url, chat=endpoint == "chat", done=done)
                result = _last(results, json_file)
        else:
            models, notes = _models(target, draft, target_shape, dtype, engine_arguments)
            notes += note or ()
            options = [_json("--tree", one) for one in tree or ()] or _TREES
            trees: plan.Trees = plan.named_trees(options)
            if static_trees:
                trees = {**_static(target, draft, trees), **trees}
            contest = Contest(models, chain or plan.CHAINS, trees, side_by_side)
            with _progress(console, settings, 1 + len(contest.chains) + len(contest.trees)) as done:
                results = of_engines(settings, contest, notes, done, lambda: end - time.monotonic())
                result = _last(results, json_file)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"dyntree bench serve: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1 if isinstance(error, RuntimeError) else 2) from None
    table.show(console, result)
    if len(list(result.cells())) > 1:
        overview.show(console, result)
    for path in plots.draw(result, plot_folder) if plot_folder is not None else ():
        console.print(path, style="dim")


def _last(results: Iterator[Result], path: Path | None) -> Result:
    """The last of the results, all of which are written: what breaks off leaves the rounds that
    were whole."""
    for result in results:
        if path is not None:
            write(result, path)
    return result


def _models(
    target: str | None, draft: str | None, shape: str | None, dtype: str, engine_arguments: str
) -> tuple[Models, list[str]]:
    """The models, and what is to be said of them."""
    if (target is None) != (draft is None):
        raise ValueError("--target and --draft go together: give both or neither")
    arguments = _json("--engine-arguments", engine_arguments)
    if target is not None and draft is not None:
        if shape is not None:
            raise ValueError("--target-shape grows the embedded target: leave out --target")
        return Models(target, draft, dtype, arguments), []
    embedded = {name: str(path) for name, path in pair.paths().items()}
    labels = {path: f"the embedded {name}" for name, path in embedded.items()}
    if shape is None:
        notes = [f"The embedded pair, {dtype}."]
        return Models(embedded["target"], embedded["draft"], dtype, arguments, labels), notes
    from dyntree_plugin.pair import shapes

    grown = shapes.grown_target(shape, Path(embedded["target"]))
    labels[str(grown)] = f"the embedded target as {shape}"
    proof = ", ".join(f"{key} {value}" for key, value in shapes.proof_of(grown).items())
    notes = [f"{shapes.limits(shape)}; {dtype}.", f"Proof of the shape: {proof}."]
    return Models(str(grown), embedded["draft"], dtype, arguments, labels), notes


def _static(target: str | None, draft: str | None, trees: plan.Trees) -> plan.Trees:
    """The best static trees of the same budgets. A grown target is as good as the embedded one."""
    from dyntree_plugin.bench.serve import static

    embedded = {name: str(path) for name, path in pair.paths().items()}
    budgets = sorted({nodes for nodes, _ in trees.values()})
    found = static.trees(target or embedded["target"], draft or embedded["draft"], budgets)
    return plan.named_trees(found)


def _json(option: str, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} {value!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} {value!r} must be a JSON object")
    return found


@contextmanager
def _progress(console: Console, settings: Settings, engines: int) -> Iterator[Done]:
    """Says what each run has given, below a bar."""
    cells = len(settings.sets) * len(settings.temperatures) * len(settings.batches)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=settings.rounds * engines * cells)

        def done(engine: Engine, cell: Cell, run: Run) -> None:
            bar.advance(task)
            bar.console.print(
                f"round {run.round + 1}  {engine.name:<20} {cell.prompts}, temperature "
                f"{cell.temperature:g}, batch {cell.batch}: {run.tpot_ms:.2f} ms per token",
                style="dim",
                soft_wrap=True,
            )

        yield done
