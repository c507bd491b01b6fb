"""Command lines in the pages are those that the commands take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from test_vocabulary import SCRIPTS

from benchmarks.serve.__main__ import USERS
from dyntree_plugin import cli

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
OF_VLLM = (["serve"], ["doctor"])
"""Commands that take the arguments of `vllm serve`."""


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of every command line in the fenced code of a page."""
    page = page.replace("\\\n", " ")
    fenced = re.findall(r"^ *```\w*\n(.*?)^ *```", page, re.M | re.S)
    for line in (line for block in fenced for line in block.splitlines()):
        if re.match(r" *(dyntree [a-z-]|python -m benchmarks\.)", line):
            yield shlex.split(line, comments=True)


def parse(words: list[str]) -> bool:
    """Parse a command line as its command does; return whether there is such a command.

    Raises:
        typer.BadParameter, click's UsageError: if it is wrong.
    """
    app, rest = cli.app, words[1:]
    if words[0] == "python":
        module, rest = words[2].removeprefix("benchmarks."), words[3:]
        if module not in SCRIPTS:
            return False
        app = SCRIPTS[module]
    command, path = typer.main.get_command(app), []
    while commands := getattr(command, "commands", None):
        if not rest or rest[0].startswith("-"):
            return False
        path.append(rest.pop(0))
        command = commands[path[-1]]
    if path in OF_VLLM:
        return False
    context = command.make_context(" ".join(path), rest)
    if context.args:  # `benchmarks.serve` hands on what it does not know
        typer.main.get_command(USERS).make_context("", context.args)
    return True


def test_a_documented_command_line_is_one() -> None:
    found = [words for path in PAGES for words in commands(path.read_text())]
    parsed = [words[1:3] for words in found if parse(words)]
    assert ["bench", "serve"] in parsed
    assert any(words[0] == "tune" for words in parsed)


@pytest.mark.parametrize(
    "line", ["dyntree bench serve --requests 4", "python -m benchmarks.serve --plots plots"]
)
def test_old_names_are_found(line: str) -> None:
    (words,) = commands(f"```\n{line}\n```")
    with pytest.raises(Exception, match=r"No such option|Missing option|Missing parameter"):
        parse(words)
