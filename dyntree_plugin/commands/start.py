"""Prepare to start an engine, and show progress while it starts."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dyntree_plugin import openmp
from dyntree_plugin.admission import versions
from dyntree_plugin.commands.paths import check_model
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.secrets import hidden
from dyntree_plugin.strict_json import from_json

Announce = Callable[[str], AbstractContextManager[None]]
"""Shows a task while its context lasts."""


def ready_for_engine() -> None:
    """End with status 1 if vLLM is not installed; restart the process to load Intel's OpenMP."""
    if missing := versions.absence():
        typer.echo(missing, err=True)
        raise SystemExit(1)  # typer.Exit is a RuntimeError, which commands catch from engines
    openmp.restart_with_library()


def tree_options(value: str, nodes: int) -> dict[str, Any]:
    """Read the options in a command's ``--dyntree``, for trees of ``--nodes``.

    Raises:
        BadParameter: for options that are refused.
    """
    try:
        options = from_json(value)
    except ValueError as error:
        raise typer.BadParameter(f"--dyntree {error}") from None
    try:
        DynTreeOptions.parse(options).resolve(nodes)
        for each in options.get("drafts", ()):
            check_model("dyntree.drafts", each)
    except ValueError as error:
        message = f"--dyntree, with num_speculative_tokens set by --nodes: {error}"
        raise typer.BadParameter(hidden(message)) from None
    return dict(options)


def fetch(model: str) -> Path:
    """Return a model's folder; download it, with Hugging Face's progress bars, if it is a name.

    Raises:
        ValueError: if it cannot be downloaded.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"model {model!r} is no folder here, and cannot be downloaded: {reason}"
        ) from None


@contextmanager
def announcing(console: Console) -> Iterator[Announce]:
    """Show long tasks with a spinner and a bar that moves."""
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
        def announce(what: str) -> Iterator[None]:
            task = progress.add_task(what, total=None)
            yield
            progress.update(task, total=1, completed=1)

        yield announce


@contextmanager
def quiet() -> Iterator[TextIO]:
    """Keep the output of this process and its children off the screen; yield a file that shows.

    At the end, vLLM's logged errors are shown on stderr, or all output if the block raises an error
    but a ValueError, which names the user's mistake.
    """
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.stdout.flush()
    sys.stderr.flush()
    screen = os.fdopen(os.dup(1), "w")
    # C++ libraries and child processes do not write through sys.stdout and sys.stderr.
    stdout, stderr = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        everything = False
        try:
            yield screen
        except BaseException as error:
            everything = isinstance(error, Exception) and not isinstance(error, ValueError)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for saved, standard in ((stdout, 1), (stderr, 2)):
                os.dup2(saved, standard)
                os.close(saved)
            screen.close()
            log.seek(0)
            sys.stderr.writelines(line for line in log if everything or "ERROR" in line)
