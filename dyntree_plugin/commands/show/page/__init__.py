"""Write a generation as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

from dyntree_plugin import __version__
from dyntree_plugin.commands.render import meaning, visible
from dyntree_plugin.commands.show.generation import Generation
from dyntree_plugin.commands.show.layout import tidy_rows
from dyntree_plugin.escape import escaped_lines
from dyntree_plugin.tree.step import TreeStep


def render(generation: Generation) -> str:
    """Return the page. Its reader chooses a step by slider, arrow key, or address (``#step=3``)."""
    # A "</script>" in a token must not end the element that holds the data.
    data = json.dumps(_page(generation), ensure_ascii=False).replace("<", "\\u003c")
    files = resources.files(__package__)
    parts = {
        "style": (files / "page.css").read_text("utf-8"),
        "script": (files / "page.js").read_text("utf-8"),
        "data": data,
    }
    page = (files / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def _page(generation: Generation) -> dict[str, Any]:
    return {
        "version": __version__,
        "target": generation.target,
        "draft": generation.draft,
        "drafter": generation.drafter,
        "dtype": generation.dtype,
        "temperature": generation.temperature,
        "topP": generation.top_p,
        "seed": generation.seed,
        "budget": generation.node_budget,
        "options": generation.options,
        "chances": generation.chances,
        "sources": {source: meaning(source) for source in generation.sources},
        "prompt": len(generation.prompt_tokens),
        "pieces": [escaped_lines(piece) for piece in generation.pieces],
        "steps": [_step(generation, step) for step in generation.steps],
    }


def _step(generation: Generation, step: TreeStep) -> dict[str, Any]:
    """Return a step's nodes with their places. Node -1 is the root; rows count from the top."""
    count = len(step.tokens)
    end = step.accepted[-1] if step.accepted else -1
    # The layout numbers the root 0, then the nodes, then the bonus token.
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
                "source": step.sources[node],
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
