"""Show the progress and the results of the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread

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
from dyntree_plugin.commands.tune.settings import Update

INTERVAL = 30.0
"""Seconds between two lines about a stage where the output is no terminal."""

_SPEED = 3600.0
"""Seconds of the past from which the time that is left is estimated; a part may take minutes."""


@contextmanager
def stage(console: Console, name: str, total: int) -> Iterator[Update]:
    """Show what is done, the time that has passed and an estimate of the rest.

    On a terminal this is a bar; elsewhere a line now and then, also while nothing is done.
    """
    columns = (
        TextColumn("{task.description:<8}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bar = (columns[0], BarColumn(bar_width=24), *columns[1:])
    progress = Progress(*bar, console=console, speed_estimate_period=_SPEED)
    task = progress.add_task(name, total=total, note="")

    def show() -> None:
        """Print a line; rich flushes it."""
        parts = [str(column.render(progress.tasks[0])) for column in columns]
        console.print(" ".join(parts).rstrip(), soft_wrap=True, markup=False)

    with progress if console.is_terminal else _repeated(show):
        yield partial(progress.update, task)


@contextmanager
def _repeated(show: Callable[[], None]) -> Iterator[None]:
    """Call ``show`` at the start, every `INTERVAL`, and at the end."""
    ended = Event()

    def repeat() -> None:
        while not ended.wait(INTERVAL):
            show()

    show()
    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show()


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
