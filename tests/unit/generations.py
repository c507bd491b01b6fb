"""A made-up generation for the tests of `dyntree show`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dyntree_plugin.commands.show.generation import Generation
from dyntree_plugin.tree.step import Source, TreeStep

WORDS = {
    1: "def",
    2: " f",
    3: "(",
    4: "x",
    5: "):",
    6: "\n    ",
    7: "</script>",
    8: '"\\',
    9: "<b>",
}


def values(*chances: float) -> list[float]:
    return [math.log(chance) for chance in chances]


def made(**changes: Any) -> Generation:
    """Return two steps: one accepts two of four nodes, the other none, and it passes the end."""
    steps = [
        TreeStep("r", 0, 2, 2, [3, 7, 4, 8], [-1, -1, 0, 0], values(0.6, 0.3, 0.5, 0.1),
                 ["draft"] * 4, [0, 2], [3, 4, 5]),
        TreeStep("r", 1, 5, 5, [9], [-1], values(0.4), ["draft"], [], [6]),
    ]  # fmt: skip
    tokens = [3, 4, 5, 6]
    given: dict[str, Any] = {
        "target": "models/large",
        "draft": "models/small",
        "dtype": "float32",
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 7,
        "node_budget": 8,
        "options": {"children": 2},
        "prompt_tokens": [1, 2],
        "tokens": tokens,
        "pieces": [WORDS[token] for token in (1, 2, *tokens)],
        "texts": WORDS,
        "steps": steps,
        "chances": "estimated",
    }
    return Generation(**given | changes)


def of_several_sources() -> Generation:
    """Return the same steps; look-up found some of the nodes."""
    first, second = made().steps
    sources: list[Source] = ["draft", "look_up", "both", "draft"]
    return made(steps=[replace(first, sources=sources), second])
