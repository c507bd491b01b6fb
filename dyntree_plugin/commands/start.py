"""What a command does before it starts an engine."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from dyntree_plugin import openmp
from dyntree_plugin.admission import versions

_STARTS_NO_ENGINE = {"--help", "--from", "--base-url"}


def ready_for_engine(arguments: Sequence[str] = ()) -> None:
    """End the command with status 1 where there is no vLLM, unless one of its ``arguments`` says
    that no engine is to start; start it anew where Intel's OpenMP has to be loaded first."""
    missing = versions.absence()
    if missing and not _STARTS_NO_ENGINE & {word.partition("=")[0] for word in arguments}:
        typer.echo(f"{missing}; `dyntree doctor` says what to install", err=True)
        raise typer.Exit(1)
    openmp.restart_with_library()
