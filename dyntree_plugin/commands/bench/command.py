"""The command ``dyntree bench serve``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperOption

from dyntree_plugin import pair
from dyntree_plugin.commands.arguments import KINDS, Method, both_or_neither, check_models, embedded
from dyntree_plugin.commands.bench import (
    arguments,
    overview,
    percentiles,
    plan,
    plots,
    prompts,
    server,
    static,
    terminal,
)
from dyntree_plugin.commands.bench.chains import chosen
from dyntree_plugin.commands.bench.pictures import check_plots
from dyntree_plugin.commands.bench.plan import Models
from dyntree_plugin.commands.bench.results import Cell, Result, write
from dyntree_plugin.commands.bench.session import Contest, Done, Settings, of_engines, of_servers
from dyntree_plugin.commands.bench.table import NONE
from dyntree_plugin.commands.loads.runs import Engine, Run
from dyntree_plugin.commands.paths import check_new_file
from dyntree_plugin.commands.start import ready_for_engine
from dyntree_plugin.commands.vocabulary import given
from dyntree_plugin.escape import escaped_lines
from dyntree_plugin.secrets import hidden
from dyntree_plugin.strict_json import object_of


def serve(
    context: typer.Context,
    target: arguments.Target = None,
    draft: arguments.Draft = None,
    method: arguments.Method = "draft_model",
    target_shape: arguments.TargetShape = None,
    dtype: arguments.Dtype = "bfloat16",
    prompt_sets: arguments.PromptSets = None,
    samplings: arguments.Samplings = None,
    count: arguments.NumPrompts = 8,
    max_tokens: arguments.MaxTokens = 128,
    batches: arguments.Batches = None,
    temperatures: arguments.Temperatures = None,
    chains: arguments.Chains = None,
    probabilistic_chains: arguments.ProbabilisticChains = None,
    block_chains: arguments.BlockChains = None,
    ngrams: arguments.NGrams = None,
    look_ups: arguments.LookUps = None,
    nodes: arguments.Nodes = None,
    trees: arguments.Trees = None,
    static_rates: arguments.StaticTrees = None,
    weights_at: arguments.WeightsAt = None,
    rounds: arguments.Rounds = 3,
    side_by_side: arguments.SideBySide = None,
    time_limit: arguments.TimeLimit = None,
    notes: arguments.Notes = None,
    engine_arguments: arguments.EngineArguments = "{}",
    base_urls: arguments.BaseUrls = None,
    endpoint: arguments.Endpoint = "completions",
    model: arguments.Model = None,
    headers: arguments.Headers = None,
    request_rates: arguments.RequestRates = None,
    burstiness: arguments.Burstiness = 1,
    seed: arguments.Seed = 0,
    result_file: arguments.ResultFile = None,
    plot_folder: arguments.PlotFolder = None,
) -> None:
    """Compare the speed of no speculation, vLLM's chains and trees, or of running servers.

    Every engine serves every load in every round, so that drift affects all of them alike. Without
    --target and --draft, the command uses the pair of tiny models that comes with dyntree.
    """
    seconds_left = _until(time_limit)
    console = Console(highlight=False)
    paces = batches or ([] if request_rates else [1, 4])
    loads = prompt_sets or [prompts.CODE], temperatures or [0.0, 1.0], paces
    try:
        further_sampling = [object_of("--sampling", each) for each in samplings or ["{}"]]
        settings = Settings(*loads, count, max_tokens, rounds, seed, further_sampling)
        check_new_file("--output", result_file)
        check_plots(plot_folder)
        if base_urls:
            _refuse(context, arguments.OF_ENGINES, "--base-url measures a running server")
            settings = _with_rates(settings, request_rates or (), burstiness)
            servers = server.engines(base_urls)
            client = server.clients(
                chat=endpoint == "chat", model=model, headers=server.headers(headers or ())
            )
            runs = settings.runs(lambda _: len(servers))
            measured = partial(of_servers, settings, servers, client, notes or ())
        else:
            _refuse(context, arguments.OF_SERVERS, "without a --base-url no server is measured")
            ready_for_engine()
            link = _speed(weights_at)
            further = object_of("--engine-arguments", engine_arguments)
            of_trees = _trees(trees, nodes, static_rates)
            lengths, left_out = chosen(
                {
                    "greedy": chains,
                    "probabilistic": probabilistic_chains,
                    "block": block_chains,
                    "n-gram": ngrams,
                },
                settings.temperatures,
            )
            models, remarks = _models(target, draft, method, target_shape, dtype, further)
            alone = tuple(dict.fromkeys(look_ups or ()))
            contest = Contest(models, lengths, of_trees, side_by_side, alone, link)
            runs = settings.runs(contest.engines)
            measured = partial(of_engines, settings, contest, [*remarks, *left_out, *(notes or ())])
        with _progress(console, runs) as done:
            result = _last(measured(done=done, seconds_left=seconds_left), result_file)
    except (ValueError, OSError, RuntimeError) as error:
        told = escaped_lines(hidden(str(error)))
        print(f"dyntree bench serve: {told}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1 if isinstance(error, RuntimeError) else 2) from None
    _show(console, result, plot_folder)


def _refuse(context: typer.Context, panel: str, reason: str) -> None:
    """Refuse the arguments of one panel of the help.

    Raises:
        ValueError: if one of them is given.
    """
    names = [
        "/".join([*option.opts, *option.secondary_opts])
        for option in given(context)
        if isinstance(option, TyperOption) and option.rich_help_panel == panel
    ]
    if names:
        raise ValueError(f"{', '.join(names)} must not be given: {reason}")


def _with_rates(settings: Settings, rates: Sequence[float], burstiness: float) -> Settings:
    """Return the settings with these rates of requests.

    Raises:
        ValueError: if a number is not above 0, or the rates do not fit other options.
    """
    for rate in rates:
        if rate <= 0:
            raise ValueError(f"--request-rate {rate:g} must be above 0, in requests per second")
    if burstiness <= 0:
        raise ValueError(f"--burstiness {burstiness:g} must be above 0")
    if burstiness != 1 and not rates:
        raise ValueError("--burstiness must not be given: it is for a --request-rate")
    return replace(settings, request_rates=rates, burstiness=burstiness)


def _speed(weights_at: float | None) -> float | None:
    """Return the speed of the virtual link.

    Raises:
        ValueError: if nothing would ever arrive.
    """
    if weights_at is not None and weights_at <= 0:
        raise ValueError(f"--weights-at {weights_at:g} must be above 0, in GB per second")
    return weights_at


def _until(limit: float | None) -> Callable[[], float]:
    """Return a function that gives the seconds left until the limit."""
    end = math.inf if limit is None else time.monotonic() + limit
    return lambda: end - time.monotonic()


def _show(console: Console, result: Result, plot_folder: Path | None) -> None:
    terminal.show(console, result)
    percentiles.show(console, result)
    if len(list(result.cells())) > 1:
        overview.show(console, result)
    for path in plots.draw(result, plot_folder) if plot_folder is not None else ():
        console.print(path, style="dim")


def _last(results: Iterator[Result], path: Path | None) -> Result:
    """Write every result, and return the last: an interrupted run leaves its complete rounds."""
    for result in results:
        if path is not None:
            write(result, path)
    return result


def _models(
    target: str | None,
    draft: str | None,
    method: Method,
    shape: str | None,
    dtype: str,
    further: dict[str, Any],
) -> tuple[Models, list[str]]:
    """Return the models, and notes on them."""
    both_or_neither(target, draft, method)
    check_models(target, draft)
    _without_progress_bars()
    if target is not None:
        if shape is not None:
            raise ValueError("--target-shape grows the embedded target: leave out --target")
        return Models(target, draft, dtype, further, method=method), []
    own, drafting = embedded(method)
    labels = {str(path): f"the embedded {n.replace('_', ' ')}" for n, path in pair.paths().items()}
    labels[str(drafting)] = kind = f"the embedded {KINDS[method]}"
    if shape is None:
        what = "pair" if method == "draft_model" else f"target and its {KINDS[method]}"
        notes = [f"The embedded {what}, {dtype}."]
        return Models(str(own), str(drafting), dtype, further, labels, method), notes
    from dyntree_plugin.pair import shapes

    grown = shapes.grown_target(shape, own)
    labels[str(grown)] = f"the embedded target as {shape}"
    if method != "draft_model":
        drafting = shapes.grown_head(shape, drafting, own)
        labels[str(drafting)] = f"{kind} as {shape}"
    proof = ", ".join(f"{key} {value}" for key, value in shapes.proof_of(grown).items())
    notes = [f"{shapes.limits(shape)}; {dtype}.", f"Proof of the shape: {proof}."]
    return Models(str(grown), str(drafting), dtype, further, labels, method), notes


def _without_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _trees(
    given: Sequence[str] | None, nodes: Sequence[int] | None, static_rates: str | None
) -> plan.Trees:
    """Return the best static trees of the sizes, followed by the dynamic ones."""
    options = [object_of("--dyntree", one) for one in given or ()] or arguments.TREES
    if nodes and all("node_budget" in each for each in options):
        raise ValueError("--nodes must not be given: every --dyntree has its own node_budget")
    dynamic = plan.named_trees(options, nodes or [arguments.NODES])
    if static_rates is None:
        return dynamic
    try:
        rates = [float(rate) for rate in static_rates.split(",")]
    except ValueError:
        raise ValueError(f"--static {static_rates!r} must be numbers, such as 0.6,0.2") from None
    budgets = sorted({nodes for nodes, _ in dynamic.values()})
    try:
        best = plan.named_trees(static.trees(rates, budgets), ())
    except ValueError as error:
        raise ValueError(f"--static {static_rates}: {error}") from None
    return {**best, **dynamic}


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
