"""`dyntree show`: the trees of a generation, in a terminal, as Graphviz DOT, or as an HTML page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from dyntree_plugin.show import page
from dyntree_plugin.show.generation import Generation, load, save
from dyntree_plugin.show.text import as_dot, as_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Format = Literal["terminal", "dot", "html"]
_BY_SUFFIX: dict[str, Format] = {".html": "html", ".htm": "html", ".dot": "dot", ".gv": "dot"}


def main(arguments: Sequence[str]) -> None:
    """Run it with the arguments behind ``dyntree show``; ends the process.

    Exit status: 0 if the trees are shown, 2 if the arguments, the models or the trace do not fit.
    """
    app(list(arguments), prog_name="dyntree show")


@app.command()
def show(
    prompt: Annotated[
        str | None, typer.Argument(help="What to complete; without it held-out Python code.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="Read the prompt from this file; - is standard input.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target model: a folder or a name.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model of the same vocabulary.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the completion.")] = 96,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Nodes of a tree.")] = 16,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Weights and arithmetic of both models.")
    ] = "float32",
    options: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="Further dyntree options; the budget is fixed, unless they say else.",
        ),
    ] = "{}",
    trace: Annotated[Path | None, typer.Option(help="Save what is drawn here, as JSON.")] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="Draw what --trace has saved; starts no engine."),
    ] = None,
    format_: Annotated[
        Format | None,
        typer.Option("--format", help="By default what the suffix of --output says, or terminal."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write here and not to standard output.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Only this step; terminal and dot, from 1.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's own messages.")] = False,
) -> None:
    """Completes a prompt and shows the tree of every step: its tokens, how likely each was
    thought to be, which were accepted, and the bonus token.

    Without --target and --draft it takes the pair of tiny models that comes with dyntree.
    """
    suffix = output.suffix.lower() if output is not None else ""
    form = format_ or _BY_SUFFIX.get(suffix, "terminal")
    if step is not None and form == "html":
        raise typer.BadParameter("--step is for --format terminal or dot: a page has all steps")
    asked = (prompt, file, target, draft, trace)
    if from_ is not None and any(value is not None for value in asked):
        raise typer.BadParameter("--from draws a saved trace: give no prompt, model or --trace")
    try:
        if from_ is not None:
            generation = load(from_)
        else:
            settings = {
                "dtype": dtype,
                "nodes": nodes,
                "options": options,
                "temperature": temperature,
                "top_p": top_p,
                "seed": seed,
                "max_tokens": max_tokens,
            }
            text = _prompt(prompt, file, own_models=target is not None)
            generation = _recorded(target, draft, text, settings, verbose=verbose)
        if trace is not None:
            save(generation, trace)
        _write(generation, form, output, step)
    except (ValueError, OSError) as error:
        if verbose:
            raise
        from dyntree_plugin.demo import message

        print(f"dyntree show: {message(error)}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None


def _prompt(prompt: str | None, file: str | None, *, own_models: bool) -> str | None:
    """The prompt; None where the held-out one is wanted."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("a prompt is given twice, as text and with --file: give it once")
    if file is not None:
        prompt = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    if prompt is None and own_models:
        raise typer.BadParameter("give a prompt for these models, as text or with --file")
    if prompt == "":
        raise typer.BadParameter("the prompt is empty")
    return prompt


def _recorded(
    target: str | None,
    draft: str | None,
    prompt: str | None,
    settings: dict[str, Any],
    *,
    verbose: bool,
) -> Generation:
    """Completes the prompt on an engine."""
    from dyntree_plugin import pair
    from dyntree_plugin.demo import announcing, fetch, tree_options
    from dyntree_plugin.demo.engines import Settings
    from dyntree_plugin.demo.quiet import quiet
    from dyntree_plugin.show.record import record

    if (target is None) != (draft is None):
        raise typer.BadParameter("--target and --draft go together: give both or neither")
    asked = tree_options(settings["options"], settings["nodes"])
    settings["options"] = {"budget": "fixed", **asked}
    if target is None or draft is None:
        target, draft = (str(path) for path in pair.paths().values())
    prompts = pair.held_out_prompts(1) if prompt is None else [prompt]
    for model in (target, draft):
        fetch(model)
    # Standard output is for the trees.
    with (
        os.fdopen(os.dup(2), "w") as screen,
        nullcontext() if verbose else quiet(),
        announcing(Console(file=screen)) as announce,
    ):
        made = Settings(target=target, draft=draft, prompts=prompts, **settings)
        return record(made, announce)


def _write(generation: Generation, form: Format, output: Path | None, step: int | None) -> None:
    steps = generation.steps
    if step is not None:
        if step > len(steps):
            raise ValueError(f"--step {step} is behind the last one: there are {len(steps)} steps")
        steps = [steps[step - 1]]
    if form == "terminal" and output is None:
        as_text(generation, steps, Console(highlight=False))
        return
    if form == "html":
        text = page.render(generation)
    elif form == "dot":
        text = as_dot(generation, steps)
    else:
        text = as_text(generation, steps)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, "utf-8")
