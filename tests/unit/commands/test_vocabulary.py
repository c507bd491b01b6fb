"""The options of all commands: one meaning per name, a sentence for each, and help at once."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import typer
from command_lines import of_commands, ran

from benchmarks.serve import __main__ as serve
from dyntree_plugin import cli
from dyntree_plugin.commands.bench import prompts
from dyntree_plugin.commands.vocabulary import NAMES, option, shared

COMMANDS = (
    "serve", "pair", "demo", "show", "tune", "doctor", "top", "dashboards", "bench", "bench serve",
)  # fmt: skip
OPTIONS = of_commands(cli.app)
EVERY = [(command, name) for command, options in OPTIONS.items() for name in options]

HEAVY = {"torch", "vllm", "numba", "matplotlib", "transformers", "scipy", "pandas"}
"""Packages that take long to import, and that no help needs."""


def of_function(function: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return app


SCRIPTS = {"serve": serve.app}


def functions(app: typer.Typer, name: str = "") -> Iterator[tuple[str, Any]]:
    for command in app.registered_commands:
        assert command.callback is not None
        yield f"{name} {command.name or command.callback.__name__}".strip(), command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from functions(group.typer_instance, str(group.name))


def kind(annotation: Any) -> Any:
    """Return the type of one value of an option: names and paths count as text."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        return kind(next(each for each in get_args(annotation) if each is not type(None)))
    return str if get_origin(annotation) is Literal or annotation is Path else annotation


def meanings(apps: dict[str, typer.Typer]) -> dict[str, dict[str, tuple[str | None, Any, str]]]:
    """Return what follows an option, its type, and its sentences, by its name and command."""
    found: dict[str, dict[str, tuple[str | None, Any, str]]] = {}
    for which, app in apps.items():
        hints = {name: get_type_hints(function) for name, function in functions(app)}
        for command, options in of_commands(app).items():
            own = hints.get(command) or (next(iter(hints.values())) if len(hints) == 1 else {})
            for name, each in options.items():
                value = kind(own.get(str(each.name)))
                found.setdefault(name, {})[f"{which} {command}"] = each.metavar, value, each.help
    return found


def two_meanings(apps: dict[str, typer.Typer]) -> list[str]:
    """Return the options that have one name and two meanings."""
    found = []
    for name, commands in meanings(apps).items():
        values = {(metavar, kind) for metavar, kind, _ in commands.values()}
        known = NAMES.get(name)
        if len(commands) > 1 and known is None:
            found.append(f"{name} of {', '.join(commands)} is not in NAMES")
        elif known is not None:
            told = all(str(help).startswith(known.meaning) for _, _, help in commands.values())
            if not told or len(values) > 1 or {v for v, _ in values} != {known.value or None}:
                found.append(f"{name} has several meanings: {commands}")
    return found


def test_a_name_has_one_meaning_in_all_commands_and_benchmarks() -> None:
    assert two_meanings({"dyntree": cli.app} | SCRIPTS) == []


@pytest.mark.parametrize(
    ("made", "of_type"),
    [
        (shared("--nodes"), str),
        (option("--nodes", "N", "Machines."), int),
        (option("--nodes", "COUNT", NAMES["--nodes"].meaning), int),
        (option("--step", "N", "Learning rate."), int),
    ],
    ids=["type", "sentence", "value", "not shared"],
)
def test_a_second_meaning_is_found(made: Any, of_type: Any) -> None:
    def function(value: Any) -> None:
        pass

    function.__annotations__["value"] = Annotated[of_type, made]
    assert len(two_meanings({"dyntree": cli.app, "other": of_function(function)})) == 1


def test_every_command_is_looked_at() -> None:
    assert OPTIONS.keys() == {"", *COMMANDS}
    assert sum(map(len, OPTIONS.values())) > 70
    used = {name for _, name in EVERY}
    assert NAMES.keys() <= used


def test_every_option_has_a_sentence_and_its_default_once() -> None:
    for command, name in EVERY:
        told = str(OPTIONS[command][name].help)
        assert re.match(r"[A-Zd'{].*\.$", told), told
        assert "default:" not in told.lower()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_80_columns_and_says_what_follows_an_option(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = ran(*command.split(), "--help")
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not re.search(r"\w…", done.stdout)  # a word that was cut
    for name in OPTIONS[command]:
        assert re.search(rf"│ (\* )? *{name}\b", done.stdout), name


def numbers() -> list[tuple[str, str]]:
    hints = {name: get_type_hints(function) for name, function in functions(cli.app)}
    return [
        (command, name)
        for command, name in EVERY
        if kind(hints.get(command, {}).get(str(OPTIONS[command][name].name))) is float
    ]


def test_numbers_are_finite() -> None:
    for command, name in numbers():
        done = ran(*command.split(), f"{name}=nan")
        assert done.exit_code == 2
        assert re.search("not a finite number|greater than|less than|not in the range", done.stderr)


def test_no_help_and_no_completion_imports_what_takes_long() -> None:
    code = f"""
import os, sys
from typer.testing import CliRunner
from dyntree_plugin import cli
invoke = CliRunner().invoke
for command in {COMMANDS!r}:
    done = invoke(cli.app, [*command.split(), "--help"])
    assert "Usage: " in done.stdout, done.output
    asked = {{"_DYNTREE_COMPLETE": "complete_bash", "COMP_WORDS": f"dyntree {{command}} --"}}
    asked["COMP_CWORD"] = str(len(command.split()) + 1)
    done = invoke(cli.app, env=asked, prog_name="dyntree")
sys.exit(", ".join({HEAVY!r} & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def completed(*words: str) -> list[str]:
    """Return what bash is offered for the last word."""
    line = " ".join(["dyntree", *words])
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    return ran(env={"_DYNTREE_COMPLETE": "complete_bash"} | asked).stdout.split()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("demo", "--method", ""), ["draft_model", "eagle3", "eagle", "mtp", "dflash"]),
        (("tune", "--dtype", "b"), ["bfloat16"]),
        (("show", "--format", ""), ["terminal", "html"]),
        (("bench", "serve", "--prompts", ""), [*prompts.HELD_OUT]),
    ],
)
def test_values_complete(words: tuple[str, ...], values: list[str]) -> None:
    assert completed(*words) == values
