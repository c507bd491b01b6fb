"""Run a command line of ``dyntree`` in this process, and list the commands' options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperOption
from typer.testing import CliRunner, Result

from dyntree_plugin import cli


def ran(*words: str, env: Mapping[str, str] | None = None) -> Result:
    """Return the result of ``dyntree`` with these words."""
    return CliRunner().invoke(cli.app, words, env=env, prog_name="dyntree")


def refused(result: Result) -> str:
    """Return the line by which ``dyntree tune`` refuses what a user gave."""
    assert result.exit_code == 2, (result.output, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith("dyntree tune: ")]
    assert len(lines) == 1, result.output
    assert "Traceback" not in result.output
    return lines[0]


def ran_benchmark(*words: str) -> Result:
    """Return the result of ``python -m benchmarks.serve`` with these words."""
    from benchmarks.serve.__main__ import app

    return CliRunner().invoke(app, words)


def status(*words: str) -> int:
    """Return the exit status of ``dyntree`` with these words; pytest captures what it writes."""
    try:
        cli.app(words, prog_name="dyntree")
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("the command did not end the process")


def of_commands(app: typer.Typer) -> dict[str, dict[str, TyperOption]]:
    """Return all options, by the names of command and option."""
    commands: dict[str, dict[str, TyperOption]] = {}

    def walk(command: Any, name: str) -> None:
        options = [each for each in command.params if isinstance(each, TyperOption)]
        commands[name] = {each.opts[0]: each for each in options}
        for below, child in getattr(command, "commands", {}).items():
            walk(child, f"{name} {below}".strip())

    walk(typer.main.get_command(app), "")
    return commands
