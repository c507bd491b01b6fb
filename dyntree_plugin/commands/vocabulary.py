"""The names of options that several commands have: one meaning and one kind of value for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperOption

LARGEST = 2**32 - 1
"""The largest integer of an option. It is numpy's largest seed."""


@dataclass(frozen=True)
class Name:
    """What the name of an option stands for. ``value`` is what follows it; "" for a switch."""

    value: str
    meaning: str


NAMES: Mapping[str, Name] = {
    "--target": Name("MODEL", "Target model: a folder or a name."),
    "--draft": Name(
        "MODEL", "What drafts for the target: a folder or a name of a model, or of a head."
    ),
    "--method": Name(
        "METHOD",
        "What the draft is: a draft_model, or a head that reads the target's hidden states (eagle3 "
        "or eagle). With mtp the target itself holds the head, and --draft is left out.",
    ),
    "--dtype": Name(
        "TYPE",
        "Type of the models' weights and arithmetic: float32, bfloat16, float16, or auto for "
        "vLLM's choice.",
    ),
    "--nodes": Name("N", "Most nodes per tree, as num_speculative_tokens."),
    "--dyntree": Name("JSON", "The dyntree options, as for `dyntree serve`."),
    "--engine-arguments": Name("JSON", "More arguments of vLLM's LLM()."),
    "--prompts": Name("SOURCE", "Where the prompts come from."),
    "--num-prompts": Name("N", "Number of prompts."),
    "--max-tokens": Name("N", "Most tokens per completion."),
    "--temperature": Name("T", "Temperature of sampling; 0 is greedy."),
    "--top-p": Name("P", "Draw from the likeliest tokens that have the probability P together."),
    "--seed": Name("N", "Seed of the first prompt; each later prompt adds 1."),
    "--batch": Name("N", "Requests that are served at once."),
    "--rounds": Name("N", "Number of rounds; each measures everything once."),
    "--output": Name("PATH", "Where the result goes."),
    "--json": Name("", "Print JSON, for programs."),
    "--verbose": Name("", "Show vLLM's own messages."),
}
"""In the order of the table in docs/options.md."""


def shared(name: str, more: str = "", **settings: Any) -> Any:
    """Return the option of a name in `NAMES`. ``more`` is what else one command says about it."""
    known = NAMES[name]
    return option(name, known.value, f"{known.meaning} {more}".strip(), **settings)


def option(name: str, value: str, meaning: str, **settings: Any) -> Any:
    """Return an option with the name of its ``value``, and a sentence. "" is a switch's value."""
    return typer.Option(name, metavar=value or None, help=meaning, callback=_bounded, **settings)


def _bounded(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Refuse numbers that no bound of an option refuses."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, float) and not math.isfinite(each):
            raise typer.BadParameter(f"{each:g} is not a finite number.")
        if isinstance(each, int) and each > LARGEST:
            raise typer.BadParameter(f"{each} is too large: the largest is {LARGEST}.")
    return value


def given(context: typer.Context) -> list[Any]:
    """Return the parameters that the command line gives, as click has them."""
    found = []
    for each in context.command.params:
        source = context.get_parameter_source(each.name or "")
        # Compared by name: some versions of typer have an enumeration of their own for click's.
        if source is not None and source.name == "COMMANDLINE":
            found.append(each)
    return found


def paragraphs(text: str | None) -> str:
    """Return a help with each paragraph on one line, unless it begins with a blank.

    typer keeps the line ends within all paragraphs but the first.
    """
    parts = (text or "").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else " ".join(each.split()) for each in parts)


def of_commands(app: typer.Typer) -> dict[str, dict[str, TyperOption]]:
    """Return the options of all commands, by the command's and the option's name."""
    found: dict[str, dict[str, TyperOption]] = {}

    def walk(command: Any, name: str) -> None:
        options = [each for each in command.params if isinstance(each, TyperOption)]
        found[name] = {each.opts[0]: each for each in options}
        for below, child in getattr(command, "commands", {}).items():
            walk(child, f"{name} {below}".strip())

    walk(typer.main.get_command(app), "")
    return found


def markdown_table(commands: Mapping[str, list[str]]) -> str:
    """Return the names as a table. ``commands`` holds the commands that have an option."""
    rows = [
        f"| `{f'{name} {known.value}'.strip()}` | {known.meaning} | {', '.join(commands[name])} |"
        for name, known in NAMES.items()
    ]
    return "\n".join(["| option | meaning | commands |", "|---|---|---|", *rows])
