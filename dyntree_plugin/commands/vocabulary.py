"""The names of options that several commands have. A name has one meaning and one kind of value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

LARGEST = 2**32 - 1
"""Largest integer of an option, which is numpy's largest seed."""


@dataclass(frozen=True)
class Name:
    """The ``meaning`` of an option's name, and the name of its ``value``, which is empty for a
    switch."""

    value: str
    meaning: str


NAMES: Mapping[str, Name] = {
    "--target": Name("MODEL", "Target model: a folder or a name."),
    "--draft": Name("MODEL", "The target's draft: a folder or a name of a model, or of a head."),
    "--method": Name(
        "METHOD",
        "Kind of the draft: a draft_model, a head that reads the target's hidden states (eagle3 or "
        "eagle), or a block draft (dflash). With mtp the head is part of the target; leave --draft "
        "out.",
    ),
    "--dtype": Name(
        "TYPE",
        "Type of the models' weights and arithmetic: float32, bfloat16, float16, or auto for "
        "vLLM's choice.",
    ),
    "--nodes": Name(
        "N", "Most nodes per tree, as num_speculative_tokens, or with dflash as node_budget."
    ),
    "--dyntree": Name("JSON", "The dyntree options, as for `dyntree serve`."),
    "--engine-arguments": Name("JSON", "More arguments of vLLM's LLM()."),
    "--prompts": Name("SOURCE", "Where the prompts come from."),
    "--chat": Name("", "Write each prompt as a message in the target's chat template."),
    "--num-prompts": Name("N", "Number of prompts."),
    "--max-tokens": Name("N", "Most tokens per completion."),
    "--temperature": Name("T", "Temperature of sampling; 0 is greedy."),
    "--top-p": Name("P", "Draw from the likeliest tokens whose probabilities add up to P."),
    "--seed": Name("N", "Seed of the first prompt; each later prompt adds 1."),
    "--batch": Name("N", "Requests that are served at once."),
    "--rounds": Name("N", "Number of rounds; each measures everything once."),
    "--output": Name("PATH", "Where the result goes."),
    "--json": Name("", "Print JSON, for programs."),
    "--verbose": Name("", "Show vLLM's messages."),
}


def shared(name: str, more: str = "", **settings: Any) -> Any:
    """Return the option of a name in `NAMES`. ``more``: what this command adds to the meaning."""
    known = NAMES[name]
    return option(name, known.value, f"{known.meaning} {more}".strip(), **settings)


def option(name: str, value: str, meaning: str, **settings: Any) -> Any:
    """Return an option. ``value``: the name of its value, empty for a switch."""
    return typer.Option(name, metavar=value or None, help=meaning, callback=_bounded, **settings)


def _bounded(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Refuse infinite and too large numbers."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, float) and not math.isfinite(each):
            raise typer.BadParameter(f"{each:g} is not a finite number.")
        if isinstance(each, int) and each > LARGEST:
            raise typer.BadParameter(f"{each} is too large: the largest is {LARGEST}.")
    return value


def given(context: typer.Context) -> list[Any]:
    """Return click's parameters that the command line gives."""
    parameters = []
    for each in context.command.params:
        source = context.get_parameter_source(each.name or "")
        # Some versions of typer have another enumeration than click's, with the same names.
        if source is not None and source.name == "COMMANDLINE":
            parameters.append(each)
    return parameters


def paragraphs(text: str | None) -> str:
    """Return a help text with each paragraph on one line, unless it begins with a blank.

    typer keeps line ends in all paragraphs but the first.
    """
    parts = (text or "").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else " ".join(each.split()) for each in parts)
