"""`dyntree top`: show figures of a running server's trees in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dyntree_plugin.commands.top.figures import Figures, figures
from dyntree_plugin.commands.top.page import Page, Unreadable, read
from dyntree_plugin.commands.top.screen import fitted, screen


def run(console: Console, address: str, interval: float, once: bool, as_json: bool) -> None:
    """Show the server at ``address`` until the user interrupts, or ``once``.

    Raises:
        Unreadable: if the server has no metrics of dyntree at the start.
    """
    page = read(address)
    if once:
        _show(console, address, figures(page), as_json)
        return
    try:
        if as_json:
            for last, now in _changes(address, page, interval):
                if isinstance(now, Page):
                    _show(console, address, figures(now, last), as_json)
                else:
                    _write(console, {"address": address, "error": str(now)})
            return
        with _shown(console) as show:
            show(screen(address, figures(page)))
            for last, now in _changes(address, page, interval):
                if isinstance(now, Page):
                    show(screen(address, figures(now), figures(now, last)))
                else:
                    show(Text(str(now), style="red"))
    except KeyboardInterrupt:
        return


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Return a function that replaces the screen.

    If the output is not a terminal, screens are printed one after another.
    """
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda shown: live.update(fitted(console, shown), refresh=True)


def _changes(
    address: str, first: Page, interval: float
) -> Iterator[tuple[Page, Page | Unreadable]]:
    """Yield the last readable page, with the current page or the reason why it cannot be read."""
    last = first
    while True:
        time.sleep(interval)
        try:
            now = read(address)
        except Unreadable as error:
            yield last, error
            continue
        yield last, now
        last = now


def _show(console: Console, address: str, figures: list[Figures], as_json: bool) -> None:
    if as_json:
        _write(console, {"address": address, "engines": [asdict(one) for one in figures]})
    else:
        console.print(screen(address, figures))


def _write(console: Console, look: dict[str, Any]) -> None:
    console.file.write(json.dumps(look) + "\n")
    console.file.flush()
