"""`dyntree demo`: held-out code completed without and with the tree, in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from dyntree_plugin import __version__, pair
from dyntree_plugin.admission import reasons, versions
from dyntree_plugin.commands.arguments import (
    Draft,
    Dtype,
    MaxTokens,
    Nodes,
    Target,
    Temperature,
    TopP,
    Verbose,
    both_or_neither,
    chosen_dtype,
)
from dyntree_plugin.commands.demo.engines import Announce, Comparison, Settings, compare
from dyntree_plugin.commands.demo.screen import show
from dyntree_plugin.commands.quiet import quiet
from dyntree_plugin.options import DynTreeOptions
from dyntree_plugin.strict_json import from_json

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str]) -> None:
    """Run it with the arguments behind ``dyntree demo``; ends the process.

    Exit status: 0 if the text is the same with and without the tree, 1 if it is not, 2 if the
    arguments or the models do not fit.
    """
    app(list(arguments), prog_name="dyntree demo")


def tree_options(value: str, nodes: int) -> dict[str, Any]:
    """The dyntree options in a command's ``--options``, for trees of ``--nodes``."""
    try:
        options = from_json(value)
    except ValueError as error:
        raise typer.BadParameter(f"--options {error}") from None
    try:
        DynTreeOptions.parse(options).resolve(nodes)
    except ValueError as error:
        message = f"--options, with num_speculative_tokens set by --nodes: {error}"
        raise typer.BadParameter(message) from None
    return dict(options)


@app.command()
def demo(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to complete.")] = 4,
    max_tokens: MaxTokens = 128,
    nodes: Nodes = 16,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the first prompt; each next has one more.")
    ] = 0,
    dtype: Dtype = None,
    options: Annotated[str, typer.Option(metavar="JSON", help="Further dyntree options.")] = "{}",
    verbose: Verbose = False,
) -> None:
    """Completes held-out Python code with the target alone and with a tree of draft tokens, shows
    that the text is the same and where the time goes, and draws one step's tree.

    Without --target and --draft it takes the pair of tiny models that comes with dyntree. Both
    engines are eager: to compile them and to capture graphs would take longer than it all, and
    `dyntree bench serve` measures such ones.
    """
    both_or_neither(target, draft)
    parsed = tree_options(options, nodes)
    console = Console(highlight=False)
    used = chosen_dtype(dtype, target)
    with nullcontext() if verbose else reasons.told_by("dyntree demo"):
        if target is None or draft is None:
            target, draft = (str(path) for path in pair.paths().values())
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
        )
        comparison = _compared(console, settings, verbose=verbose)
    raise typer.Exit(show(console, settings, comparison))


def _compared(console: Console, settings: Settings, *, verbose: bool) -> Comparison:
    """What both engines give, told while it is made."""
    console.print(_heading(settings))
    for model in (settings.target, settings.draft):
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
        (f"target {settings.target}\ndraft  {settings.draft}", "dim"),
    )


def fetch(model: str) -> None:
    """Downloads a model that is no folder, with Hugging Face's own progress bars."""
    if not Path(model).is_dir():
        from huggingface_hub import snapshot_download

        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])


@contextmanager
def announcing(console: Console) -> Iterator[Announce]:
    """Shows what takes long with a spinner, and with a bar where its parts are known."""
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=console,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:

        @contextmanager
        def announce(what: str, parts: int | None) -> Iterator[Callable[[], None]]:
            task = progress.add_task(what, total=parts)
            yield lambda: progress.advance(task)
            progress.update(task, total=parts or 1, completed=parts or 1)

        yield announce
