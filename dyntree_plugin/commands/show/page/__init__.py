"""A generation as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

from dyntree_plugin import __version__
from dyntree_plugin.commands.render import visible
from dyntree_plugin.commands.show.generation import Generation
from dyntree_plugin.commands.show.layout import tidy_rows
from dyntree_plugin.escape import escaped_lines
from dyntree_plugin.tree.step import TreeStep


def render(generation: Generation) -> str:
    """The page; steps are chosen with a slider, the arrow keys, or ``#step=3`` in its address."""
    # A "</script>" in a token must not end the element that the data stands in.
    data = json.dumps(_page(generation), ensure_ascii=False).replace("<", "\\u003c")
    files = resources.files(__package__)
    parts = {
        "style": (files / "page.css").read_text("utf-8"),
        "script": (files / "page.js").read_text("utf-8"),
        "data": data,
    }
    page = (files / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


def _page(generation: Generation) -> dict[str, Any]:
    return {
        "version": __version__,
        "target": generation.target,
        "draft": generation.draft,
        "dtype": generation.dtype,
        "temperature": generation.temperature,
        "topP": generation.top_p,
        "seed": generation.seed,
        "budget": generation.node_budget,
        "options": generation.options,
        "chances": generation.chances,
        "prompt": len(generation.prompt_tokens),
        "pieces": [escaped_lines(piece) for piece in generation.pieces],
        "steps": [_step(generation, step) for step in generation.steps],
    }


def _step(generation: Generation, step: TreeStep) -> dict[str, Any]:
    """A step's nodes with their places; ``-1`` is the root, and every row counts from the top."""
    count = len(step.tokens)
    end = step.accepted[-1] if step.accepted else -1
    # As numbers of the layout: the root, the nodes, the bonus token.
    children = [[child + 1 for child in step.children(node)] for node in range(-1, count)]
    children.append([])
    children[end + 1].append(count + 1)
    rows = tidy_rows(children)
    depths = [0] * (count + 2)
    for above, below in enumerate(children):
        for child in below:
            depths[child] = depths[above] + 1
    accepted = set(step.accepted)
    return {
        "context": step.context_length,
        "emitted": len(step.emitted),
        "root": _node(generation, step.root_token, rows[0], 0),
        "nodes": [
            _node(generation, token, rows[node + 1], depths[node + 1])
            | {
                "parent": step.parents[node],
                "probability": _rounded(step.probability(node)),
                "value": _rounded(step.value(node)),
                "accepted": node in accepted,
            }
            for node, token in enumerate(step.tokens)
        ],
        "bonus": _node(generation, step.bonus_token, rows[-1], depths[-1]) | {"parent": end},
    }


def _node(generation: Generation, token: int, row: float, depth: int) -> dict[str, Any]:
    return {"token": token, "text": visible(generation.text(token)), "row": row, "depth": depth}


def _rounded(probability: float) -> float:
    return float(f"{probability:.4g}")
