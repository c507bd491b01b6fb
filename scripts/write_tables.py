"""Write the generated tables into the pages of docs/, between their marks: make tables

A table's marks are the lines `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import gpu_model
from benchmarks.acceptance import report
from dyntree_plugin import cli
from dyntree_plugin.commands import vocabulary
from dyntree_plugin.commands.bench import table
from dyntree_plugin.commands.bench.results import read
from dyntree_plugin.commands.bench.summary import rows
from dyntree_plugin.commands.vocabulary import of_commands
from dyntree_plugin.metrics import names
from dyntree_plugin.options import pages as option_pages
from dyntree_plugin.tree import pairs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)

SOURCES = ("code", "prose", "edit", "retrieval", "conversation")
"""Workloads on which sources of candidates are compared."""


def _acceptance(name: str) -> str:
    return report.markdown_table(_result(name))


def _result(name: str) -> report.Result:
    loaded: report.Result = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def _speed(name: str) -> str:
    return table.markdown_table(read(RESULTS / f"{name}.json"))


def _tokens_per_step(name: str) -> str:
    """Compare engines by their tokens per step alone, and with the chain that has the most."""
    result = read(RESULTS / f"{name}.json")
    cells = list(dict.fromkeys(series.cell for series in result.series))
    lines = ["| | " + " | ".join(f"temperature {c.temperature:g} | × best chain" for c in cells)]
    lines[0] += " |"
    lines.append("|---|" + "---:|" * (2 * len(cells)))
    for engine in result.engines:
        line = f"| {engine.name} |"
        for cell in cells:
            found = {row.series.engine: row.tokens_per_step or 0.0 for row in rows(result, cell)}
            best = max(found.get(e.name, 0.0) for e in result.engines if e.kind == "chain")
            own = found.get(engine.name)
            line += " – | – |" if own is None else f" {own:.2f} | {own / best:.2f} |"
        lines.append(line)
    return "\n".join(lines)


def _by_requests(*files: str) -> str:
    """Compare the tokens per step of engines, a row for each kind of requests and temperature."""
    lines: list[str] = []
    for result in (read(RESULTS / f"{name}.json") for name in files):
        engines = [*result.engines]
        if not lines:
            lines.append("| | | " + " | ".join(e.name for e in engines) + " | × best chain |")
            lines.append("|---|---|" + "---:|" * (1 + len(engines)))
        for cell in dict.fromkeys(series.cell for series in result.series):
            found = {row.series.engine: row.tokens_per_step or 0.0 for row in rows(result, cell)}
            best = max(found.get(e.name, 0.0) for e in engines if e.kind == "chain")
            tree = next(found[e.name] for e in engines if e.kind == "dynamic tree")
            values = " | ".join(f"{found[e.name]:.2f}" if e.name in found else "–" for e in engines)
            name = f"{cell.prompts} | {cell.temperature:g}"
            lines.append(f"| {name} | {values} | {tree / best:.2f} |")
    return "\n".join(lines)


STEP = (
    ("engine/stage.py", "place"),
    ("engine/runner.py", "verify"),
    ("engine/step/verify.py", "verify"),
    ("engine/speculator.py", "propose"),
    ("engine/step/draft.py", "draft"),
    ("tree/drafting.py", "grow"),
)
"""The functions of a step, in the order in which it runs them."""


def _step() -> str:
    """Return the bodies of the functions of a step, as they are in the code."""
    parts = [_body(ROOT / "dyntree_plugin" / path, name) for path, name in STEP]
    return "```python\n" + "\n\n".join(parts) + "\n```"


def _body(path: Path, name: str) -> str:
    """Return the body of a function, without its docstring."""
    source = path.read_text()
    found = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    function = next(found)
    first = function.body[0]
    begin = function.body[1 if isinstance(first, ast.Expr) else 0].lineno
    lines = source.splitlines()
    body = textwrap.dedent("\n".join(lines[begin - 1 : function.end_lineno]))
    return f"# {path.relative_to(ROOT / 'dyntree_plugin')}: {name}\n{body}"


TABLES: dict[str, Callable[[], str]] = {
    "step": _step,
    "options": option_pages.markdown_tables,
    "names": lambda: vocabulary.markdown_table(_commands()),
    "metrics": names.markdown_table,
    "rules": pairs.markdown_table,
    "acceptance": lambda: _acceptance("acceptance-cpu"),
    "posterior": lambda: report.posterior_markdown(_result("posterior-cpu")),
    **{f"sources_{name}": partial(_acceptance, f"sources-{name}-cpu") for name in SOURCES},
    "serve": lambda: _speed("serve-llama-1b"),
    "serve_without_amx": lambda: _speed("serve-llama-1b-without-amx"),
    "serve_eleven_chains": lambda: _speed("serve-llama-1b-eleven-chains"),
    "tokens_block": lambda: _tokens_per_step("tokens-block"),
    "tokens_block_chains": lambda: _tokens_per_step("tokens-block-chains"),
    "serve_block_chains": lambda: _speed("serve-llama-1b-block-chains"),
    "serve_block_chains_64": lambda: _speed("serve-llama-1b-block-chains-64"),
    "serve_head": lambda: _tokens_per_step("tokens-eagle3"),
    "serve_head_drawn": lambda: _tokens_per_step("tokens-eagle3-drawn"),
    "serve_head_1b": lambda: _speed("serve-llama-1b-eagle3"),
    "requests": lambda: _by_requests("requests-cpu", "requests-penalty-cpu"),
    "requests_drawn": lambda: _by_requests("requests-drawn-cpu"),
    "serve_offload": lambda: _speed("serve-llama-1b-offload"),
    "tokens_offload": lambda: _tokens_per_step("tokens-offload"),
    **gpu_model.TABLES,
    "serve_look_up": lambda: _speed("serve-llama-1b-look-up"),
}


def _commands() -> dict[str, list[str]]:
    """Return the commands that have an option, by the option's name."""
    found: dict[str, list[str]] = {}
    for command, options in of_commands(cli.app).items():
        for name in options:
            found.setdefault(name, []).append(f"`{command}`")
    return found


def with_tables(page: str) -> str:
    """Return a page with its tables as they are to be."""
    return MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]().strip()}\n{m[4]}", page)


def main() -> None:
    for path in sorted((ROOT / "docs").glob("*.md")):
        page = path.read_text()
        if (written := with_tables(page)) != page:
            path.write_text(written)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
