"""Read requests from the lines of a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path

from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.paths import read_text
from dyntree_plugin.strict_json import single_keys

FIELDS = ("prompt", "text", "question", "turns")
"""Fields of a JSONL line that may have the prompt. ``turns``, as in Spec-Bench, is a list, whose
first entry is used."""

SAMPLING = "sampling"
"""Field of a JSONL line for the request's sampling parameters."""


def lines(path: Path) -> list[Request]:
    """Return the request of every line that is not blank.

    Raises:
        ValueError: if the file is not UTF-8 or a line has no request.
    """
    # Other characters than these end a line only for `str.splitlines`.
    read = read_text("--prompts", path).split("\n")
    return [
        _request(line, f"--prompts {str(path)!r}, line {number}")
        for number, line in enumerate(read, start=1)
        if line.strip()
    ]


def _request(line: str, where: str) -> Request:
    try:
        value = json.loads(line, object_pairs_hook=single_keys)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object with the prompt")
    given = next((value[name] for name in FIELDS if name in value), None)
    prompt = given[0] if isinstance(given, list) and given else given
    if not isinstance(prompt, str):
        raise ValueError(f"{where} must have its prompt as text in one of {', '.join(FIELDS)}")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError(f"{where} has half of a surrogate pair, \\ud800 to \\udfff, in its prompt")
    sampling = value.get(SAMPLING, {})
    if not isinstance(sampling, dict):
        raise ValueError(f"{where} must have a JSON object in {SAMPLING}")
    return Request(prompt, sampling)
