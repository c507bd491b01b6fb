"""`dyntree demo`: complete held-out code without and with a tree, in one run."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dyntree_plugin import __version__, pair
from dyntree_plugin.admission import reasons, versions
from dyntree_plugin.commands import arguments as common
from dyntree_plugin.commands.demo.comparison import Comparison, compare
from dyntree_plugin.commands.demo.screen import show
from dyntree_plugin.commands.ending import ends_by_signals
from dyntree_plugin.commands.engine import Task
from dyntree_plugin.commands.start import (
    announcing,
    fetch,
    quiet,
    ready_for_engine,
    tree_options,
)
from dyntree_plugin.commands.vocabulary import shared


@ends_by_signals()
def demo(
    target: common.Target = None,
    draft: common.Draft = None,
    method: common.DraftMethod = "draft_model",
    dtype: common.Dtype = None,
    nodes: common.Nodes = 16,
    options: Annotated[str, shared("--dyntree")] = "{}",
    count: common.NumPrompts = 4,
    max_tokens: common.MaxTokens = 128,
    temperature: common.Temperature = 0,
    top_p: common.TopP = 1,
    seed: common.Seed = 0,
    verbose: common.Verbose = False,
) -> None:
    """Complete code with and without a tree, compare the two, and draw a tree.

    Held-out Python code is completed by the target alone, and with a tree of draft tokens. The
    command shows that the text is the same, and where the time goes.

    Without --target and --draft, it uses the pair of tiny models that comes with dyntree. Both
    engines are eager, because compiling and capturing graphs would take longer than the whole
    demonstration. On a GPU, `dyntree bench serve` measures compiled engines.

    The exit status is 0 if the text is the same, 1 if it differs, and 2 if the arguments or the
    models are refused.
    """
    common.both_or_neither(target, draft, method)
    with reasons.exit_on_mistake("dyntree demo"):
        common.check_models(target, draft)
    ready_for_engine()
    parsed = tree_options(options, nodes)
    console = Console(highlight=False)
    used = common.chosen_dtype(dtype, target)
    with nullcontext() if verbose else reasons.exit_on_mistake("dyntree demo"):
        if target is None:
            target, draft = map(str, common.embedded(method))
        task = Task(
            target=target,
            draft=draft,
            dtype=used,
            nodes=nodes,
            options=parsed,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=max_tokens,
            prompts=_prompts(count),
            method=method,
        )
        comparison = _compared(console, task, verbose=verbose)
    raise typer.Exit(show(console, task, comparison))


def _prompts(count: int) -> list[str]:
    """Return held-out prompts.

    Raises:
        ValueError: if there are fewer.
    """
    try:
        return pair.held_out_prompts(count)
    except ValueError as error:
        raise ValueError(f"--num-prompts: {error}") from None


def _compared(console: Console, task: Task, *, verbose: bool) -> Comparison:
    """Run both engines, and show the progress."""
    console.print(_heading(task))
    for model in task.models:
        fetch(model)
    with (
        nullcontext(sys.stdout) if verbose else quiet() as screen,
        announcing(Console(file=screen)) as announce,
    ):
        return compare(task, announce)


def _heading(task: Task) -> Text:
    name, version = versions.installed_vllm() or ("vllm", "")
    drawing = (
        f"temperature {task.temperature:g}, top-p {task.top_p:g}" if task.temperature else "greedy"
    )
    return Text.assemble(
        (f"dyntree {__version__}", "bold"),
        f" on {name} {version}, dtype {task.dtype}, eager, {drawing}, at most {task.nodes} nodes\n",
        (f"target {task.target}\n", "dim"),
        (f"{task.drafter:<6} {task.draft or 'the target holds it'}", "dim"),
    )
