"""`dyntree doctor`: what works on this machine, and what of a command line would be refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dyntree_plugin.admission import versions
from dyntree_plugin.commands.doctor.checks import Check, companions, device_type, memory, of_machine
from dyntree_plugin.commands.quiet import quiet

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


def run(command: Sequence[str], *, build_kernels: bool, as_json: bool, verbose: bool) -> int:
    """Check, and show what was found; the exit status, 1 if anything fails.

    ``command``: arguments of ``dyntree serve``; without any only the machine is checked.
    """
    with os.fdopen(os.dup(2), "w") as screen, nullcontext() if verbose else quiet():
        tell = _teller(screen)
        checks = []
        for check in _checks(command, build_kernels, tell):
            checks.append(check)
            tell(f"{check.name}: {check.status}")
        tell("")
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        report = {"ok": not failed, "checks": [asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    else:
        _show(checks, len(failed), with_command=bool(command))
    return 1 if failed else 0


def _checks(
    command: Sequence[str], build_kernels: bool, tell: Callable[[str], None]
) -> Iterator[Check]:
    yield from of_machine()
    if versions.installed_vllm() is None:
        return
    found = companions()
    yield found
    if found.status == "fail":  # vLLM cannot be imported
        return
    from dyntree_plugin.commands.doctor import command_line, kernels

    config = None
    if command:
        checks, config = command_line.of_command_line(command)
        yield from checks
    else:
        yield kernels.attention()
        if device_type() == "cpu":
            yield kernels.layout()
            yield _default_memory()
    if build_kernels:
        yield from kernels.build(*command_line.variants(config), tell)


def _default_memory() -> Check:
    from vllm import EngineArgs

    found = memory(EngineArgs.gpu_memory_utilization)
    # A command line may ask for less.
    return replace(found, status="warn") if found.status == "fail" else found


def _teller(screen: TextIO) -> Callable[[str], None]:
    """Shows one line of progress, which the next replaces; on a terminal only."""

    def tell(line: str) -> None:
        if screen.isatty():
            screen.write(f"\r\033[K{line}")
            screen.flush()

    return tell


def _show(checks: Sequence[Check], failed: int, *, with_command: bool) -> None:
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
    if failed:
        console.print(f"\n[bold red]{failed} of {len(checks)} checks fail[/] on {what}.")
    else:
        console.print(f"\n[bold green]Nothing is in the way[/] of dyntree on {what}.")
