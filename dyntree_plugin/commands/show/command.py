"""`dyntree show`: draw the trees of a completion in a terminal, or as a page."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dyntree_plugin import pair
from dyntree_plugin.admission import reasons
from dyntree_plugin.commands import arguments as common
from dyntree_plugin.commands.ending import ends_by_signals
from dyntree_plugin.commands.engine import Task
from dyntree_plugin.commands.paths import check_new_file, read_text
from dyntree_plugin.commands.render import step_panel
from dyntree_plugin.commands.show import arguments, page
from dyntree_plugin.commands.show.arguments import Format
from dyntree_plugin.commands.show.generation import Generation, load, save
from dyntree_plugin.commands.start import (
    announcing,
    fetch,
    quiet,
    ready_for_engine,
    tree_options,
)
from dyntree_plugin.commands.vocabulary import given

_BY_SUFFIX: dict[str, Format] = {
    ".html": "html",
    ".htm": "html",
    ".txt": "terminal",
    "": "terminal",
}
_WIDTH = 100
"""Of a drawing in a file, in characters."""
_OF_TRACES = {"saved", "given_format", "output", "step", "verbose"}
"""Parameters of `show` that go with a saved trace."""


@ends_by_signals()
def show(
    context: typer.Context,
    prompt: arguments.Prompt = None,
    file: arguments.PromptFile = None,
    target: common.Target = None,
    draft: common.Draft = None,
    method: common.DraftMethod = "draft_model",
    dtype: common.Dtype = None,
    nodes: common.Nodes = 16,
    options: arguments.Options = "{}",
    max_tokens: common.MaxTokens = 96,
    temperature: common.Temperature = 0,
    top_p: common.TopP = 1,
    seed: common.Seed = 0,
    given_format: arguments.GivenFormat = None,
    output: arguments.Output = None,
    step: arguments.Step = None,
    trace: arguments.Trace = None,
    saved: arguments.SavedTrace = None,
    verbose: common.Verbose = False,
) -> None:
    """Show the tree of every step of a completion: in the terminal, or as a page.

    A tree shows its tokens with their estimated probabilities, which of them were accepted, and
    the bonus token.

    Without --target and --draft, dyntree uses the pair of tiny models that comes with it.

    The exit status is 2 if the arguments, the models or the trace are refused.
    """
    form = given_format or _form_of(output)
    if step is not None and form == "html":
        raise typer.BadParameter("--step is for --format terminal: a page has all steps")
    if saved is not None:
        _refuse_settings(context)
    with reasons.exit_on_mistake("dyntree show"):
        check_new_file("--output", output)
        check_new_file("--trace", trace)
        _check_kept("--from", saved, output)
        _check_kept("--trace", trace, output)
        common.check_models(target, draft)
    if saved is None:
        common.both_or_neither(target, draft, method)
        ready_for_engine()
    settings: dict[str, Any] = {"dtype": common.chosen_dtype(dtype, target), "options": options}
    settings |= {"nodes": nodes, "temperature": temperature, "top_p": top_p}
    settings |= {"seed": seed, "max_tokens": max_tokens, "method": method}
    with nullcontext() if verbose else reasons.exit_on_mistake("dyntree show"):
        if saved is not None:
            generation = load(saved)
        else:
            text = _prompt(prompt, file, own_models=target is not None)
            generation = _recorded(target, draft, text, settings, verbose=verbose)
        if trace is not None:
            save(generation, trace)
        _write(generation, form, output, step)


def _form_of(output: Path | None) -> Format:
    """Return the format of a file's suffix; without a file, the terminal's."""
    suffix = "" if output is None else output.suffix.lower()
    if suffix not in _BY_SUFFIX:
        known = ", ".join(filter(None, _BY_SUFFIX))
        raise typer.BadParameter(
            f"--output {str(output)!r}: the suffix must be one of {known}, unless --format is given"
        )
    return _BY_SUFFIX[suffix]


def _refuse_settings(context: typer.Context) -> None:
    """Refuse every argument about completing a prompt."""
    names = [each.opts[0] for each in given(context) if each.name not in _OF_TRACES]
    if names:
        raise typer.BadParameter(f"--from draws a saved trace: leave out {', '.join(names)}")


def _check_kept(option: str, trace: Path | None, output: Path | None) -> None:
    """Refuse to write the drawing over the trace.

    Raises:
        ValueError: if both are one file.
    """
    if trace is not None and output is not None and trace.resolve() == output.resolve():
        raise ValueError(f"--output {str(output)!r} would overwrite the trace of {option}")


def _prompt(prompt: str | None, file: str | None, *, own_models: bool) -> str | None:
    """Return the prompt, or None for the held-out one."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("a prompt is given twice, as text and with --file: give it once")
    if file is not None:
        prompt = sys.stdin.read() if file == "-" else read_text("--file", Path(file))
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
    """Complete the prompt on an engine."""
    from dyntree_plugin.commands.show.record import record

    asked = tree_options(settings["options"], settings["nodes"])
    settings["options"] = {"budget": "fixed", **asked}
    if target is None:
        target, draft = map(str, common.embedded(settings["method"]))
    prompts = pair.held_out_prompts(1) if prompt is None else [prompt]
    made = Task(target=target, draft=draft, prompts=prompts, **settings)
    for model in made.models:
        fetch(model)
    # Standard output is for the trees.
    with (
        os.fdopen(os.dup(2), "w") as screen,
        nullcontext() if verbose else quiet(),
        announcing(Console(file=screen)) as announce,
    ):
        return record(made, announce)


def _write(generation: Generation, form: Format, output: Path | None, step: int | None) -> None:
    steps = generation.steps
    if not steps:
        raise ValueError("there is no tree to draw: the text ended before one was verified")
    if step is not None and step > len(steps):
        raise ValueError(f"--step {step} does not exist: there are {len(steps)} steps")
    file = nullcontext(sys.stdout) if output is None else output.open("w", encoding="utf-8")
    with file as into:
        if form == "html":
            into.write(page.render(generation))
            return
        plain: dict[str, Any] = {} if output is None else {"width": _WIDTH, "color_system": None}
        console = Console(file=into, highlight=False, **plain)
        for number, each in enumerate(steps, start=1):
            if step in (None, number):
                title, before = f"Step {number} of {len(steps)}", generation.context(each)
                shown = step_panel(each, before, generation.text, title, generation.sources)
                console.print(shown)
