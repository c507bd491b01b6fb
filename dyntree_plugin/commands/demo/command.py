"""`dyntree demo`: complete held-out code without and with a tree, in one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dyntree_plugin import __version__, pair
from dyntree_plugin.admission import reasons, versions
from dyntree_plugin.commands.arguments import (
    Draft,
    DraftMethod,
    Dtype,
    MaxTokens,
    Nodes,
    Target,
    Temperature,
    TopP,
    Verbose,
    both_or_neither,
    chosen_dtype,
    embedded,
)
from dyntree_plugin.commands.demo.comparison import Comparison, compare
from dyntree_plugin.commands.demo.screen import show
from dyntree_plugin.commands.engine import Settings
from dyntree_plugin.commands.start import announcing, fetch, quiet, tree_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments after ``dyntree demo``, and end the process.

    Exit status: 0 if the text is the same with and without the tree, 1 if it differs, 2 if the
    arguments or the models are refused.
    """
    app(list(arguments), prog_name="dyntree demo")


@app.command()
def demo(
    target: Target = None,
    draft: Draft = None,
    method: DraftMethod = "draft_model",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts to complete.")] = 4,
    max_tokens: MaxTokens = 128,
    nodes: Nodes = 16,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first prompt; each later prompt adds 1.")
    ] = 0,
    dtype: Dtype = None,
    options: Annotated[str, typer.Option(metavar="JSON", help="More dyntree options.")] = "{}",
    verbose: Verbose = False,
) -> None:
    """Complete held-out Python code with the target alone and with a tree of draft tokens. Show
    that the text is the same and where the time goes, and draw one step's tree.

    Without --target and --draft, the demonstration uses the pair of tiny models that comes with
    dyntree. Both engines are eager, because compiling and capturing graphs would take longer than
    the whole demonstration. `dyntree bench serve` measures compiled engines.
    """
    both_or_neither(target, draft, method)
    parsed = tree_options(options, nodes)
    console = Console(highlight=False)
    used = chosen_dtype(dtype, target)
    with nullcontext() if verbose else reasons.exit_on_mistake("dyntree demo"):
        if target is None:
            target, draft = map(str, embedded(method))
        settings = Settings(
            target=target,
            draft=draft,
            dtype=used,
            nodes=nodes,
            options=parsed,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=max_tokens,
            prompts=pair.held_out_prompts(prompts),
            method=method,
        )
        comparison = _compared(console, settings, verbose=verbose)
    raise typer.Exit(show(console, settings, comparison))


def _compared(console: Console, settings: Settings, *, verbose: bool) -> Comparison:
    """Run both engines, and show the progress."""
    console.print(_heading(settings))
    for model in settings.models:
        fetch(model)
    with (
        nullcontext(sys.stdout) if verbose else quiet() as screen,
        announcing(Console(file=screen)) as announce,
    ):
        return compare(settings, announce)


def _heading(settings: Settings) -> Text:
    name, version = versions.installed_vllm() or ("vllm", "")
    drawing = (
        f"temperature {settings.temperature:g}, top-p {settings.top_p:g}"
        if settings.temperature
        else "greedy"
    )
    return Text.assemble(
        (f"dyntree {__version__}", "bold"),
        f" on {name} {version}, dtype {settings.dtype}, eager, {drawing}, "
        f"at most {settings.nodes} nodes\n",
        (f"target {settings.target}\n", "dim"),
        (f"{settings.drafter:<6} {settings.draft or 'the target holds it'}", "dim"),
    )
