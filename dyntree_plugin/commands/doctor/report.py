"""The report of `dyntree doctor`: checks, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


@dataclass(frozen=True)
class Check:
    """One line of the report. ``fail`` means that something is broken or would be refused."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def write_json(checks: Sequence[Check]) -> None:
    """Write the report to standard output as one JSON object."""
    report = {"ok": not failures(checks), "checks": [asdict(check) for check in checks]}
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def failures(checks: Sequence[Check]) -> int:
    """Number of checks that fail."""
    return sum(check.status == "fail" for check in checks)


def show(checks: Sequence[Check], *, with_command: bool) -> None:
    """Print the report as a table, and a verdict on the machine or the command line."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.found)
        if check.advice:
            text.append(f"\n→ {check.advice}", style="dim" if check.status == "ok" else "")
        table.add_row(_MARKS[check.status], check.name, text)
    console = Console(highlight=False)
    console.print(table)
    what = "this command line" if with_command else "this machine"
    failed = failures(checks)
    if failed:
        console.print(f"\n[bold red]{failed} of {len(checks)} checks fail[/] on {what}.")
    else:
        console.print(f"\n[bold green]Nothing is in the way[/] of dyntree on {what}.")
