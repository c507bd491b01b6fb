"""`dyntree top`: a running server's trees at a glance, in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dyntree_plugin.commands.top.figures import Figures, figures
from dyntree_plugin.commands.top.page import Page, Unreadable, read
from dyntree_plugin.commands.top.screen import screen


def run(console: Console, address: str, interval: float, once: bool, as_json: bool) -> None:
    """Show the server at ``address`` until interrupted, or ``once``.

    Raises:
        Unreadable: if the server gives no metrics of ours at the start.
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
        with Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(screen(address, figures(page)), refresh=True)
            for last, now in _changes(address, page, interval):
                if isinstance(now, Page):
                    live.update(screen(address, figures(now), figures(now, last)), refresh=True)
                else:
                    live.update(Text(str(now), style="red"), refresh=True)
    except KeyboardInterrupt:
        return


def _changes(
    address: str, first: Page, interval: float
) -> Iterator[tuple[Page, Page | Unreadable]]:
    """Again and again the last readable page, and the present one or why there is none."""
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


def _show(console: Console, address: str, found: list[Figures], as_json: bool) -> None:
    if as_json:
        _write(console, {"address": address, "engines": [asdict(one) for one in found]})
    else:
        console.print(screen(address, found))


def _write(console: Console, look: dict[str, Any]) -> None:
    console.file.write(json.dumps(look) + "\n")
    console.file.flush()
