"""Read JSON that users write on a command line."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from dyntree_plugin.secrets import hidden


def from_json(text: str) -> Any:
    """Read JSON, and refuse an object with equal keys.

    Raises:
        ValueError: quoting the text, or naming the key.
    """
    try:
        return json.loads(text, object_pairs_hook=single_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"{hidden(text)!r} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{hidden(text[:20])!r}… is nested too deeply") from None


def object_of(option: str, value: str) -> dict[str, Any]:
    """Read the JSON object that an option was given.

    Raises:
        ValueError: naming the option, if it is no JSON object.
    """
    try:
        found = from_json(value)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} {hidden(value)!r} must be a JSON object")
    return found


def single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `json.loads`.

    Raises:
        ValueError: naming a key that is given twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            both = [reprlib.repr(hidden({key: each})[key]) for each in (found[key], value)]
            raise ValueError(f"key {key!r} is given twice, with {both[0]} and {both[1]}")
        found[key] = value
    return found
