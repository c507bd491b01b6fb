"""Scripts that read their arguments with argparse read the arguments that they declare."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "examples", "kernels", "scripts", "tests/e2e")
    for path in (ROOT / folder).rglob("*.py")
    if ".parse_args(" in path.read_text("utf-8")
)


def calls(tree: ast.AST, method: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == method:
            yield node


def declared(tree: ast.AST) -> set[str]:
    """Return the names of the values of all arguments."""
    found = set()
    for call in calls(tree, "add_argument"):
        named = [word.value for word in call.keywords if word.arg == "dest"]
        (name,) = named or call.args[:1]
        assert isinstance(name, ast.Constant)
        found.add(str(name.value).lstrip("-").replace("-", "_"))
    return found


def read(tree: ast.AST) -> set[str]:
    """Return what is read of the variable that holds the parsed arguments, in its function."""
    found = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and [*calls(node.value, "parse_args")]
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found |= {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        }
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_reads_arguments_that_it_declares(script: str) -> None:
    tree = ast.parse((ROOT / script).read_text("utf-8"))
    assert read(tree) <= declared(tree)


def test_an_argument_that_is_not_declared_is_found() -> None:
    """Control."""
    text = (ROOT / "examples" / "metrics.py").read_text("utf-8")
    assert {"target", "draft", "num_prompts", "max_tokens"} == read(ast.parse(text))
    tree = ast.parse(text.replace("given.num_prompts", "given.prompts"))
    assert read(tree) - declared(tree) == {"prompts"}
