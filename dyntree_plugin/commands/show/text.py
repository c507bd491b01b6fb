"""A generation's trees as text: for a terminal, and as Graphviz DOT."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from dyntree_plugin.commands.demo.screen import tree
from dyntree_plugin.commands.render import dot
from dyntree_plugin.commands.show.generation import Generation
from dyntree_plugin.tree.step import TreeStep

_WIDTH = 100


def as_text(
    generation: Generation, steps: Sequence[TreeStep], console: Console | None = None
) -> str:
    """One panel per step, on ``console`` or, without one, as plain lines."""
    file = io.StringIO()
    to = console or Console(file=file, width=_WIDTH, color_system=None)
    for step in steps:
        title = f"Step {generation.steps.index(step) + 1} of {len(generation.steps)}"
        to.print(tree(step, generation.context(step), generation.text, title))
    return file.getvalue()


def as_dot(generation: Generation, steps: Sequence[TreeStep]) -> str:
    """One graph per step, ``step1`` and so on, one behind the other."""
    return "\n".join(
        dot(step, generation.text, f"step{generation.steps.index(step) + 1}") for step in steps
    )
