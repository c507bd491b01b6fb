"""Show the figures of engines in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.bar import Bar
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from dyntree_plugin.commands.top.figures import Figures
from dyntree_plugin.escape import escaped

BAR_WIDTH = 16


def screen(
    address: str, since_start: Sequence[Figures], lately: Sequence[Figures] | None = None
) -> RenderableType:
    """Show every engine's figures since its start, beside those of the last interval."""
    recent = {(one.model_name, one.engine): one for one in lately or ()}
    shown = [_engine(total, recent.get((total.model_name, total.engine))) for total in since_start]
    return Group(Text(escaped(f"dyntree top – {address}"), style="bold"), *shown)


def fitted(console: Console, shown: RenderableType) -> RenderableType:
    """Return the lines that fit into the terminal; the last one says how many do not."""
    lines = console.render_lines(shown, pad=False)
    if len(lines) <= console.height:
        return shown
    kept = lines[: max(console.height - 1, 0)]
    missing = f"… {len(lines) - len(kept)} more lines: enlarge the window, or use --once"
    ended = [segment for line in kept for segment in (*line, Segment.line())]
    return Group(Segments(ended), Text(missing, style="yellow"))


def _engine(total: Figures, lately: Figures | None) -> Panel:
    now = total if lately is None or not lately.request_steps else lately
    reached = {str(depth): share for depth, share in enumerate(now.reached, start=1)}
    parts = [
        _table(total, lately),
        _bars("step, ms", {s: v * 1e3 for s, v in now.stage_seconds.items()}, "{:.2f}"),
        _bars("reached depth", reached, "{:.0%}"),
    ]
    if len(now.sources) > 1:
        parts.append(_bars("accepted from", now.sources, "{:.0%}"))
    if now.fallbacks:
        parts.append(_bars("fallback", now.fallbacks, "{:.1%}"))
    # Options that the growth does not read have no value.
    in_force = [f"{name}={value}" for name, value in total.configuration.items() if value]
    options = ", ".join(in_force)
    return Panel(
        Group(Columns(parts, padding=(0, 3)), Text(escaped(f"dyntree {options}"), style="dim")),
        title=Text(escaped(f"{total.model_name} · engine {total.engine}")),
        subtitle=f"{total.running} running, {total.waiting} waiting",
        expand=False,
    )


def _table(total: Figures, lately: Figures | None) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("")
    columns = [total] if lately is None else [lately, total]
    for one in columns:
        heading = "since start" if one.seconds is None else f"last {one.seconds:.0f} s"
        table.add_column(heading, justify="right")
    for name, values in _rows(columns):
        table.add_row(name, *values)
    return table


def _rows(columns: Sequence[Figures]) -> list[tuple[str, list[Text]]]:
    return [
        ("acceptance length", [_number(f.acceptance_length, good=1.2) for f in columns]),
        ("speed against none", [_number(f.speed, "{:.2f} ×", good=1) for f in columns]),
        ("tokens per step", [_number(f.tokens_per_step) for f in columns]),
        ("tokens per second", [_number(f.tokens_per_second, "{:.0f}") for f in columns]),
        ("node efficiency", [_number(f.node_efficiency, "{:.1%}") for f in columns]),
        ("nodes of the budget", [_nodes(f) for f in columns]),
        ("calibration", [_number(f.calibration) for f in columns]),
        ("fallback", [_number(f.fallback_share, "{:.1%}") for f in columns]),
        ("request steps", [_number(f.request_steps, "{:.0f}") for f in columns]),
    ]


def _number(value: float | None, form: str = "{:.2f}", good: float | None = None) -> Text:
    if value is None:
        return Text("–", style="dim")
    style = "" if good is None else "green" if value >= good else "red"
    return Text(form.format(value), style=style)


def _nodes(figures: Figures) -> Text:
    if figures.nodes is None:
        return Text(f"– / {figures.node_budget}", style="dim")
    return Text(f"{figures.nodes:.1f} / {figures.node_budget}")


def _bars(title: str, values: Mapping[str, float], form: str) -> Table:
    """Show values by name as bars; the largest value fills its bar."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column(title)
    table.add_column("", justify="right")
    table.add_column("")
    largest = max(values.values(), default=0)
    for name, value in values.items():
        bar = Bar(largest, 0, value, width=BAR_WIDTH, color="cyan")
        table.add_row(Text(escaped(name)), form.format(value), bar)
    return table
