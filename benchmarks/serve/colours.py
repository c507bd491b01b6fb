"""What a picture calls an engine's kind, and the colour that it has in every picture."""

from __future__ import annotations

from dyntree_plugin.commands.bench.chains import KINDS, kind_of
from dyntree_plugin.commands.loads.runs import Engine

_COLOURS = {
    "plain": "#555555", "static tree": "#E69F00", "dynamic tree": "#009E73", "server": "#882255",
    "greedy": "#084D96", "probabilistic": "#2E95D3", "block": "#8C6BB1", "n-gram": "#D55E00",
}  # fmt: skip
"""Those of chains are by the names in `KINDS`."""


def group_of(engine: Engine) -> str:
    """Return the name of an engine's group: the kind of a chain, or what the engine is."""
    return KINDS[kind_of(engine)].name if engine.kind == "chain" else engine.kind


def colour(engine: Engine) -> str:
    return _COLOURS[kind_of(engine) if engine.kind == "chain" else engine.kind]
