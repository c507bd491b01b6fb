"""The table of a result file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dyntree_plugin.commands.bench.table import NONE

Entry = Mapping[str, Any]
"""A count of `judge`, with its model, type, kind and temperature."""


def table(series: Sequence[Entry]) -> str:
    """Return a table in Markdown: a row for each kind of prompts, and for all of a model."""
    temperatures = sorted({each["temperature"] for each in series})
    steps = [f"tokens per step, T {each:g}" for each in temperatures]
    heads = ["", "prompts", "answers", "tokens", "differ", "by a tie", *steps]
    lines = [f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for name in dict.fromkeys(map(_name, series)):
        found = [each for each in series if _name(each) == name]
        for kind in dict.fromkeys(each["kind"] for each in found):
            of_kind = [each for each in found if each["kind"] == kind]
            lines.append(_row(name, kind, of_kind, temperatures))
        lines.append(_row(name, "all", found, temperatures))
    return "\n".join(lines)


def _name(entry: Entry) -> str:
    return f"{entry['model']}, {entry['dtype']}"


def _row(name: str, kind: str, found: Sequence[Entry], temperatures: Sequence[float]) -> str:
    answers, tokens, ties, other = (
        sum(each[column] for each in found) for column in ("answers", "tokens", "ties", "other")
    )
    cells = [name, kind, f"{answers:,}", f"{tokens:,}", f"{ties + other}", f"{ties}"]
    for temperature in temperatures:
        at = [each for each in found if each["temperature"] == temperature]
        emitted, steps = (sum(each[column] for each in at) for column in ("later", "steps"))
        cells.append(f"{emitted / steps:.2f}" if steps else NONE)
    return f"| {' | '.join(cells)} |"
