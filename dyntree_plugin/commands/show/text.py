"""Write a generation's trees as text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from dyntree_plugin.commands.render import step_panel
from dyntree_plugin.commands.show.generation import Generation
from dyntree_plugin.tree.step import TreeStep

_WIDTH = 100


def as_text(
    generation: Generation, steps: Sequence[TreeStep], console: Console | None = None
) -> str:
    """Print one panel per step on ``console``; without it, return them as plain lines."""
    file = io.StringIO()
    to = console or Console(file=file, width=_WIDTH, color_system=None)
    for step in steps:
        title = f"Step {generation.steps.index(step) + 1} of {len(generation.steps)}"
        before = generation.context(step)
        to.print(step_panel(step, before, generation.text, title, generation.sources))
    return file.getvalue()
