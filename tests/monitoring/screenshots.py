"""Make docs/images/top.svg: `dyntree top` for a served pair.

The argument is the output folder. The server and its traffic are real and run for some minutes. The
target is the embedded one, enlarged to the cost of `SHAPE`.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
import time
from pathlib import Path

import stack
import traffic
from rich.console import Console

from benchmarks.serve.shapes import grown_target
from dyntree_plugin import pair
from dyntree_plugin.commands.top.figures import figures
from dyntree_plugin.commands.top.page import read
from dyntree_plugin.commands.top.screen import screen

SHAPE = "llama-1b"
SECONDS = 150.0
TOP_SECONDS = 10.0


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = grown_target(SHAPE, pair.paths()["target"])
    with (
        tempfile.TemporaryDirectory() as scratch,
        stack.server(Path(scratch), "--dtype", "bfloat16", target=target) as server,
    ):
        address = server.address
        client = threading.Thread(target=_ask, args=(address, time.monotonic() + SECONDS))
        client.start()
        time.sleep(SECONDS / 2)
        _await_requests(address, 4)
        before = read(address)
        time.sleep(TOP_SECONDS)
        now = read(address)
        console = Console(file=io.StringIO(), record=True, width=132)
        console.print(screen(address, figures(now), figures(now, before)))
        svg = console.export_svg(title=f"dyntree top {address}")
        (folder / "top.svg").write_text(svg)
        client.join()


def _ask(address: str, until: float) -> None:
    """Send requests in waves of 1, 2 and 4 at once; some are structured."""
    wave = 0
    while time.monotonic() < until:
        count = 1 << wave % 3
        structured = traffic.STRUCTURED if wave % 4 == 3 else []
        stack.complete(address, [*traffic.free(count, max_tokens=120), *structured])
        wave += 1


def _await_requests(address: str, count: int) -> None:
    deadline = time.monotonic() + SECONDS / 2 - TOP_SECONDS
    while sum(engine.running for engine in figures(read(address))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{address}: {count} requests never ran at once")
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
