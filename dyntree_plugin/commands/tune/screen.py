"""Show the progress and the results of the stages."""

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
"""Takes how much is done, and a line about it."""


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
    """Counts and shows progress."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self._done = 0

    def __call__(self, more: int = 1) -> None:
        self._done += more
        self._update(self._done, "")


def unknown_table(posteriors: Mapping[str, Mapping[float, Posterior]]) -> Table:
    """Return the bits per token that drafts leave unknown, by temperature."""
    title = "bits per token that the draft leaves unknown, on the same prompts"
    table = Table(title=title, title_justify="left")
    for heading in ("temperature", "tokens", *posteriors):
        table.add_column(heading, justify="right")
    first = next(iter(posteriors.values()))
    for temperature, begun in first.items():
        shown = [_bits(each[temperature], begun) for each in posteriors.values()]
        table.add_row(f"{temperature:g}", str(begun.positions), *shown)
    return table


def _bits(draft: Posterior, begun: Posterior) -> str:
    """Return the bits of a draft, and their ratio to those of the first if they are comparable."""
    shown = f"{draft.bits:.3f}"
    if draft is not begun and draft.unreachable == begun.unreachable:
        shown += f" ({draft.bits / begun.bits - 1:+.1%})"
    if draft.unreachable:
        shown += f", {draft.unreachable:.1%} of tokens left out"
    return shown


def steps_table(steps: Mapping[str, Steps]) -> Table:
    """Return tokens per step by temperature and nodes, and ratios to the first engine."""
    table = Table(title="tokens per step, on prompts that were held out", title_justify="left")
    for heading in ("temperature", "nodes", *steps):
        table.add_column(heading, justify="right")
    first, *others = steps.values()
    for temperature, nodes in sorted(first, key=lambda place: (place[1], place[0])):
        here = (temperature, nodes)
        shown = [f"{first[here]:.3f}"]
        shown += [f"{each[here]:.3f} ({each[here] / first[here] - 1:+.1%})" for each in others]
        table.add_row(f"{temperature:g}", str(nodes), *shown)
    return table
