"""Show a result as tables, in the terminal or in Markdown for docs/results.md."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dyntree_plugin.commands.bench.results import Cell, Result
from dyntree_plugin.commands.bench.summary import (
    Row,
    Spread,
    fallback_shares,
    longest_chain_is_best,
    rows,
)

_NONE = "–"


def show(console: Console, result: Result) -> None:
    """Show every cell. Losses against the first engine, or of a tree against a chain, are red."""
    for cell in result.cells():
        table = Table(title=_title(cell), title_justify="left", title_style="bold")
        table.add_column(no_wrap=True)
        for column in _columns(result):
            table.add_column(column, justify="right", overflow="fold")
        for row in rows(result, cell):
            table.add_row(
                row.series.engine,
                *(Text(text, style="red" if lost else "") for text, lost in _cells(result, row)),
                style="bold" if _has_trees(result, row) else None,
            )
        console.print(table)
        for line in _remarks(result, cell):
            console.print(Text(line, style="yellow"))
    for note in result.notes:
        console.print(Text(note, style="dim"))


def markdown_table(result: Result) -> str:
    """Return every cell and the notes in Markdown; losses are marked "(loses)"."""
    lines = []
    for cell in result.cells():
        columns = _columns(result)
        lines += [
            f"**{_title(cell)}**",
            "",
            f"| | {' | '.join(columns)} |",
            "|---|" + "---:|" * len(columns),
        ]
        for row in rows(result, cell):
            texts = [f"{text} (loses)" if lost else text for text, lost in _cells(result, row)]
            lines.append(f"| {row.series.engine} | {' | '.join(texts)} |")
        lines += ["", *(f"{line}\n" for line in _remarks(result, cell))]
    lines += [f"- {note}" for note in result.notes]
    return "\n".join(lines).strip() + "\n"


def _columns(result: Result) -> tuple[str, ...]:
    return (
        "tokens /step", "ms /step", "ms /token", "tokens /s", f"× {result.engines[0].name}",
        "× best chain", "other tokens",
    )  # fmt: skip


def _title(cell: Cell) -> str:
    drawing = "greedy" if cell.temperature == 0 else f"temperature {cell.temperature:g}"
    return f"{cell.prompts}, {drawing}, {cell.pace}"


def _has_trees(result: Result, row: Row) -> bool:
    return "tree" in result.engine(row.series.engine).kind


def _cells(result: Result, row: Row) -> Iterator[tuple[str, bool]]:
    """Yield the text of every column, and whether it is a loss."""
    yield _NONE if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}", False
    yield f"{row.step_ms.median:.1f}" if row.step_ms.median else _NONE, False
    yield _with_spread(row.tpot_ms), False
    yield f"{row.tokens_per_second.median:.1f}", False
    yield _with_spread(row.over_first), _loses(row.over_first)
    if row.over_chain is None:
        yield _NONE, False
    else:
        # All chains but the best are slower than the best.
        yield _with_spread(row.over_chain), _has_trees(result, row) and _loses(row.over_chain)
    series = row.series
    if series.differing_requests is None:
        yield _NONE, False
    elif series.differing_tokens is None:
        yield f"{series.differing_requests} of {series.runs[0].requests} texts", False
    else:
        yield f"{series.differing_tokens} of {series.compared_tokens}", False


def _loses(ratio: Spread) -> bool:
    return round(ratio.median, 2) < 1


def _with_spread(spread: Spread) -> str:
    """Return the median, and half of the range if there is one."""
    if spread.low == spread.high:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ±{(spread.high - spread.low) / 2:.2f}"


def _remarks(result: Result, cell: Cell) -> Iterator[str]:
    if longest_chain_is_best(result, cell):
        yield "The longest chain is the best one here: a longer one may be better still."
    for name, series in result.of(cell).items():
        if shares := fallback_shares(series):
            reasons = ", ".join(f"{reason} {share:.1%}" for reason, share in shares.items())
            yield (
                f"{name}: chains or no tree in {sum(shares.values()):.1%} of its requests' steps "
                f"({reasons})."
            )
