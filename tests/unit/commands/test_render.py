"""Trees as text: what is drawn, and what is left out."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dyntree_plugin.commands.demo.screen import code
from dyntree_plugin.commands.render import (
    MAX_SIBLINGS,
    Detokenise,
    meaning,
    rich_tree,
    step_panel,
    visible,
)
from dyntree_plugin.tree.step import SOURCES, Source, TreeStep, sources_of

#          root
#      0         1
#    2   3       4
#        5
TREE: dict[str, Any] = {
    "request_id": "a",
    "step": 0,
    "context_length": 7,
    "root_token": 99,
    "tokens": [10, 11, 12, 13, 14, 15],
    "parents": [-1, -1, 0, 0, 1, 3],
    "values": [math.log(x) for x in (0.5, 0.4, 0.3, 0.2, 0.1, 0.05)],
    "sources": ["draft"] * 6,
    "accepted": [0, 3],
    "emitted": [10, 13, 77],
}
STEP = TreeStep(**TREE)
ODD = [
    *("\x1b]0;title\x07", "\x1b[2J", "\u202ecba", "\x9b2J", "\r"),
    *("[red]x[/red]", "[/]", "&lt;", '"];'),
]


def name(token: int) -> str:
    return f"t{token}"


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    system = "truecolor" if terminal else None
    return Console(file=file, force_terminal=terminal, color_system=system, width=width), file


def plain_text(
    step: TreeStep, text: Detokenise, max_siblings: int | None = MAX_SIBLINGS, width: int = 100
) -> str:
    """Return the tree as it is written to a file."""
    to, file = console(terminal=False, width=width)
    to.print(rich_tree(step, text, max_siblings))
    return file.getvalue()


@st.composite
def steps(draw: st.DrawFn) -> TreeStep:
    count = draw(st.integers(0, 24))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    values: list[float] = []
    for parent in parents:
        above = values[parent] if parent >= 0 else 0.0
        values.append(above - draw(st.floats(0, 5)))
    accepted: list[int] = []
    end = -1
    while below := [node for node in range(count) if parents[node] == end]:
        if not draw(st.booleans()):
            break
        end = draw(st.sampled_from(below))
        accepted.append(end)
    tokens = list(range(count))
    sources = [draw(st.sampled_from(SOURCES)) for _ in tokens]
    return TreeStep("r", 0, 5, 900, tokens, parents, values, sources, accepted, [*accepted, 901])


def indentation(text: str) -> dict[int, int]:
    """Return the column of every drawn token."""
    return {
        int(found[1]): found.start(1)
        for line in text.splitlines()
        if (found := re.search(r"\bt(\d+)\b", line))
    }


@settings(deadline=None)
@given(steps())
def test_every_node_is_drawn_once_and_right_of_its_parent(step: TreeStep) -> None:
    text = plain_text(step, name, max_siblings=None, width=400)
    drawn = re.findall(r"\bt(\d+)\b", text)
    assert sorted(map(int, drawn)) == [*step.tokens, step.root_token, step.bonus_token]
    column = indentation(text.replace("✓ ", ""))
    for node, parent in enumerate(step.parents):
        above = step.tokens[parent] if parent >= 0 else step.root_token
        assert column[node] > column[above]


@settings(deadline=None)
@given(steps())
def test_exactly_the_accepted_nodes_are_marked_without_colour(step: TreeStep) -> None:
    text = plain_text(step, name, max_siblings=None, width=400)
    marked = [int(token) for token in re.findall(r"✓ t(\d+)", text)]
    assert marked == [step.tokens[node] for node in step.accepted]


def wide(count: int, accepted: int) -> TreeStep:
    """Return a root with ``count`` children of falling value, and one node below the last child."""
    return TreeStep(
        "r",
        0,
        5,
        900,
        tokens=list(range(count + 1)),
        parents=[-1] * count + [count - 1],
        values=[-1.0 - child for child in range(count)] + [-100.0],
        sources=["draft"] * (count + 1),
        accepted=[accepted],
        emitted=[accepted, 901],
    )


def test_a_long_list_of_siblings_keeps_the_best_and_the_accepted_and_counts_the_rest() -> None:
    text = plain_text(wide(20, accepted=13), name, max_siblings=4)
    drawn = {int(token) for token in re.findall(r"\bt(\d+)\b", text)} - {900, 901}
    assert drawn == {0, 1, 2, 13}
    assert "16 more with 1 below, value at most 0.018" in text


MIXED = replace(STEP, sources=["draft", "look_up", "both", "look_up", "draft", "draft"])
MARKS = ["draft", "look-up", "both", "look-up", "draft", "draft"]


def panel(step: TreeStep, sources: list[Source]) -> str:
    to, file = console(terminal=False)
    to.print(step_panel(step, "", name, sources=sources))
    return file.getvalue()


def test_every_node_shows_its_source_if_the_trees_have_several() -> None:
    text = panel(MIXED, sources_of([MIXED]))
    marked = dict(re.findall(r"t(\d+)  \d\.\d+  \d\.\d+  ([a-z-]+)", text))
    assert marked == {str(token): mark for token, mark in zip(STEP.tokens, MARKS, strict=True)}
    (legend,) = re.findall(r"source: (.*?) *│", text)
    assert re.split("   ", legend) == [meaning(source) for source in SOURCES]


@settings(deadline=None)
@given(st.text(max_size=30) | st.sampled_from(ODD))
def test_any_text_of_a_token_is_a_label_and_nothing_else(token: str) -> None:
    def text(_: int) -> str:
        return token

    to, file = console(terminal=False, width=400)
    to.print(step_panel(STEP, token, text))
    assert file.getvalue().replace("\n", "").isprintable()
    assert file.getvalue().count(visible(token)) >= len(STEP.tokens) + 2
    to.print(code(token, token))
    assert file.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": [-1, -1, 0, 3, 1, 3]}, r"parents\[3\]=3"),
        ({"values": [0.0]}, "one entry per node"),
        ({"accepted": [0, 4]}, "no path from the root"),
        ({"emitted": [10, 13]}, "accepted tokens and one bonus"),
    ],
)
def test_what_is_no_tree_with_a_path_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeStep(**TREE | change)


def path(depth: int) -> TreeStep:
    """Return a step of one path of so many nodes, all accepted."""
    nodes = list(range(depth))
    parents, values = [node - 1 for node in nodes], [-0.1 * (node + 1) for node in nodes]
    sources: list[Source] = ["look_up"] * depth
    return TreeStep("r", 0, 5, 900, nodes, parents, values, sources, nodes, [*nodes, 1])


def test_a_deep_tree_takes_a_line_per_node_in_a_small_terminal() -> None:
    depth = 32
    to, file = console(terminal=False, width=80)
    sources: list[Source] = ["draft", "look_up"]
    to.print(step_panel(path(depth), "", lambda _: "·isinstance", sources=sources))
    lines = [line for line in file.getvalue().splitlines() if "└" in line]
    assert len(lines) == depth + 1
    for line in lines[:-1]:
        assert re.search(r"✓ ·isinstance  0\.\d{3}  0\.\d{3}  look-up ", line), line
    assert "+ ·isinstance  bonus " in lines[-1]
