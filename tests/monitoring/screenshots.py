"""Make the README's pictures of a served pair: `dyntree top`, and a dashboard of Prometheus' data.

The argument is the output folder. The server, its traffic and Prometheus are real and run for some
minutes. The target is the embedded one, enlarged to the cost of `SHAPE`. Each panel shows the
answer to its query. The pictures name commit and hardware.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import stack
import traffic
from generated import DASHBOARDS, filled_in, legend, panels
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from stack import Prometheus

from benchmarks.serve.shapes import grown_target
from dyntree_plugin import pair
from dyntree_plugin.commands.top.figures import figures
from dyntree_plugin.commands.top.page import read
from dyntree_plugin.commands.top.screen import screen
from dyntree_plugin.provenance import provenance

BOARD = "tree_at_a_glance"
SHAPE = "llama-1b"
SECONDS = 150.0
STEP = 1.0
WINDOW = "10s"
INCHES_PER_COLUMN, INCHES_PER_ROW = 0.62, 0.32
HEADER_ROWS = 2
TOP_SECONDS = 10.0
COLOURS = {
    "green": "#73BF69",
    "orange": "#FF9830",
    "red": "#F2495C",
    "blue": "#5794F2",
    "purple": "#B877D9",
}
"""Grafana's colours of these names."""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        stack.server(
            Path(scratch), "--dtype", "bfloat16", target=grown_target(SHAPE, pair.paths()["target"])
        ) as server,
        stack.prometheus(Path(scratch), server.address) as prometheus,
    ):
        address = server.address
        client = threading.Thread(target=_ask, args=(address, time.monotonic() + SECONDS))
        client.start()
        time.sleep(SECONDS / 2)
        _await_requests(address, 4)
        before = read(address)
        time.sleep(TOP_SECONDS)
        now = read(address)
        picture_of_top(
            folder / "top.svg", address, screen(address, figures(now), figures(now, before))
        )
        client.join()
        time.sleep(2 * STEP)
        picture_of_board(folder / "dashboard.png", prometheus)


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


def picture_of_top(path: Path, address: str, shown: Any) -> None:
    console = Console(file=io.StringIO(), record=True, width=132)
    console.print(shown)
    path.write_text(console.export_svg(title=f"dyntree top {address}"))


def picture_of_board(path: Path, prometheus: Prometheus) -> None:
    """Draw every panel of the dashboard at its place."""
    board = DASHBOARDS[BOARD]
    rows = HEADER_ROWS + max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    with mpl.rc_context({"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(24 * INCHES_PER_COLUMN, rows * INCHES_PER_ROW), dpi=110)
        for heading in (p for p in board["panels"] if p["type"] == "row"):
            top = 1 - (HEADER_ROWS + heading["gridPos"]["y"] + 0.5) / rows
            figure.text(0.01, top, heading["title"], fontsize=11, va="center")
        for panel in panels(board):
            _panel(figure, rows, panel, prometheus)
        made = provenance(["make", "screenshots"])
        figure.text(0.01, 1 - 0.5 / rows, board["title"], fontsize=14, va="top", weight="bold")
        where = f"{made['cpu']}, {made['cores']} cores · {made['utc']}"
        origin = f"embedded pair, its target as {SHAPE}, on {where}"
        figure.text(0.99, 1 - 0.5 / rows, origin, fontsize=8, va="top", ha="right", color="gray")
        figure.savefig(path, metadata={"Description": json.dumps(made)})


def _panel(figure: Figure, rows: int, panel: dict[str, Any], prometheus: Prometheus) -> None:
    place = panel["gridPos"]
    top = 1 - (HEADER_ROWS + place["y"]) / rows
    left, width, height = place["x"] / 24, place["w"] / 24, place["h"] / rows
    inside = (left + 0.035, top - 0.82 * height, width - 0.05, 0.62 * height)
    axes = figure.add_axes(inside)
    axes.set_title(panel["title"], loc="left")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] == "stat":
        _number(axes, prometheus.value(filled_in(panel["targets"][0]["expr"], WINDOW)), unit)
        return
    colours = _fixed_colours(panel)
    top_value = 0.0
    for target in panel["targets"]:
        found = prometheus.over_time(filled_in(target["expr"], WINDOW), SECONDS, STEP)
        for labels, points in found.items():
            seconds = [at - points[-1][0] for at, _ in points]
            values = [value * (100 if unit == "percentunit" else 1) for _, value in points]
            name = legend(target["legendFormat"], json.loads(labels))
            axes.plot(seconds, values, label=name, color=colours.get(name))
            top_value = max(top_value, *values)
    axes.set_xlim(-SECONDS, 0)
    # Leave room for the legend above the lines.
    axes.set_ylim(0, 1.3 * top_value or 1)
    axes.grid(alpha=0.3)
    axes.set_ylabel("%" if unit == "percentunit" else "" if unit == "short" else unit)
    axes.legend(loc="upper left", fontsize=7, framealpha=0.6, ncols=3)


def _fixed_colours(panel: dict[str, Any]) -> dict[str, str]:
    """Return the colour of each series whose meaning has one."""
    return {
        override["matcher"]["options"]: COLOURS.get(
            made["value"]["fixedColor"], made["value"]["fixedColor"]
        )
        for override in panel["fieldConfig"]["overrides"]
        for made in override["properties"]
        if made["id"] == "color"
    }


def _number(axes: Axes, value: float, unit: str) -> None:
    axes.set_axis_off()
    form = "{:.1%}" if unit == "percentunit" else "{:.0f}" if value.is_integer() else "{:.2f}"
    text = "No traffic" if math.isnan(value) else form.format(value)
    axes.text(0.0, 0.35, text, fontsize=20, va="center")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
