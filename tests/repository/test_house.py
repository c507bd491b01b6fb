"""Files and functions stay short enough to be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("dyntree_plugin", "kernels", "benchmarks")
    for path in (REPOSITORY / folder).rglob("*.py")
)
BESIDE = sorted(
    path
    for folder in ("tests", "scripts", "examples")
    for path in (REPOSITORY / folder).rglob("*.py")
)
MOST_LINES = 400
MOST_LINES_OF_A_BODY = 50

PROGRAMS = {"_latent_attention", "_learn", "_path_attention", "_tree_attention"}
"""Triton programs that are one loop each. A part of the loop would need most of its variables."""


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def bodies(source: str) -> Iterator[tuple[str, int]]:
    """Yield every function's name, and the lines of its body without arguments and docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[documented]
            yield node.name, (node.end_lineno or first.lineno) - first.lineno + 1


def too_long(source: str) -> set[str]:
    return {name for name, count in bodies(source) if count > MOST_LINES_OF_A_BODY}


def test_the_sources_are_found() -> None:
    assert {"options.py", "contracts.py", "shapes.py"} <= {path.name for path in SOURCES}
    assert {"test_house.py", "write_tables.py", "offline.py"} <= {path.name for path in BESIDE}
    assert lines(REPOSITORY / "dyntree_plugin" / "options" / "options.py") > 100


def test_no_file_is_long() -> None:
    assert [path.name for path in SOURCES + BESIDE if lines(path) > MOST_LINES] == []


def test_no_function_is_long() -> None:
    long = {name for path in SOURCES for name in too_long(path.read_text("utf-8"))}
    assert long == PROGRAMS


def test_a_long_function_is_found_and_its_arguments_and_docstring_do_not_count() -> None:
    arguments = ",\n".join(f"a{i}" for i in range(60))
    body = "\n".join(["    x = 1"] * 50)
    documented = f'def f(\n{arguments}\n):\n    """A\n{"b" * 9}\n    """\n{body}'
    assert list(bodies(documented)) == [("f", 50)]
    assert too_long(documented) == set()
    assert too_long(f"{documented}\n    x = 2") == {"f"}
