"""Published models as targets, with prompts by kind."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

from benchmarks.real import prompts
from benchmarks.real.models import MODELS, fetched
from dyntree_plugin.commands.loads.requests import Request

KINDS = tuple(dict.fromkeys(prompt.kind for prompt in prompts.read()))
"""Names of the sets of prompts."""
ALL = "all"
"""The set of all prompts, whose kinds take turns."""


def words(name: str, given: dict[str, Any]) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Return words for the command line, labels of the models, and requests by set.

    ``given``: the command line's values; without sets of prompts every kind is one.

    Raises:
        ValueError: if the model cannot be fetched.
    """
    model = MODELS[name]
    folder = str(fetched(model))
    found = ["--target", folder, *(["--chat"] if model.chat and not given["chat"] else [])]
    if not given["prompt_sets"]:
        found += [word for kind in KINDS for word in ("--prompts", kind)]
    return found, {folder: model.name}, sets()


def sets() -> dict[str, list[Request]]:
    """Return the requests of every kind, and of all of them."""
    by_kind: dict[str, list[Request]] = {kind: [] for kind in KINDS}
    for prompt in prompts.read():
        by_kind[prompt.kind].append(Request(prompt.text, prompt.sampling))
    in_turns = chain.from_iterable(zip_longest(*by_kind.values()))
    return by_kind | {ALL: [each for each in in_turns if each is not None]}
