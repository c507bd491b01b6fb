"""Show the progress of the stages, and what they have found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dyntree_plugin.commands.tune.check import Steps
from dyntree_plugin.tune.posterior import Posterior

Update = Callable[[int, str], None]
"""Gets how much is done, and a line about it."""


@contextmanager
def stage(console: Console, name: str, total: int) -> Iterator[Update]:
    """Show a bar with the time that has passed and an estimate of the rest."""
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=total, note="")
        yield lambda done, note: progress.update(bar, completed=done, note=note)


class Counter:
    """Counts what is done, and shows it."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self._done = 0

    def __call__(self, more: int = 1) -> None:
        self._done += more
        self._update(self._done, "")


def unknown_table(found: Mapping[str, Mapping[float, Posterior]]) -> Table:
    """Return the bits per token that drafts leave unknown, by temperature."""
    title = "bits per token that the draft leaves unknown, on the same prompts"
    table = Table(title=title, title_justify="left")
    for heading in ("temperature", "tokens", *found):
        table.add_column(heading, justify="right")
    first, *others = found.values()
    beyond = any(each.unreachable for of_one in found.values() for each in of_one.values())
    if beyond:
        table.add_column("cannot be drafted", justify="right")
    for temperature, begun in first.items():
        shown = [f"{begun.bits:.3f}"]
        for each in others:
            bits = each[temperature].bits
            shown.append(f"{bits:.3f} ({bits / begun.bits - 1:+.1%})")
        if beyond:
            shown.append(f"{begun.unreachable:.1%} of tokens")
        table.add_row(f"{temperature:g}", str(begun.positions), *shown)
    return table


def steps_table(found: Mapping[str, Steps]) -> Table:
    """Return tokens per step by temperature and nodes, and ratios to the first engine."""
    table = Table(title="tokens per step, on prompts that were held out", title_justify="left")
    for heading in ("temperature", "nodes", *found):
        table.add_column(heading, justify="right")
    first, *others = found.values()
    for temperature, nodes in sorted(first, key=lambda place: (place[1], place[0])):
        here = (temperature, nodes)
        shown = [f"{first[here]:.3f}"]
        shown += [f"{each[here]:.3f} ({each[here] / first[here] - 1:+.1%})" for each in others]
        table.add_row(f"{temperature:g}", str(nodes), *shown)
    return table
