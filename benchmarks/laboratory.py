"""What the laboratory measured of trees and chains: the acceptance that the models reckon with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FILES = ("small-trees-cpu.json", "acceptance-cpu.json")
"""Results of ``python -m benchmarks.acceptance`` with few nodes and with many."""
DEPTHS = "depths-cpu.json"

TREE, CHAIN, BLOCK = "calibrated", "chain", "block"
"""The method that dyntree serves with, and chains of the same draft. ``CHAIN`` is greedy at
temperature 0. Above, it is drawn and verified by rejection sampling, as vLLM's probabilistic
chains are. ``BLOCK`` is drawn and verified as a block, above temperature 0 alone."""


@dataclass(frozen=True)
class Drafted:
    """Mean figures of one step of one request: the nodes that the target verifies, the tokens that
    come of it, and the draft's forwards and the rows of them all."""

    nodes: float
    tokens: float
    forwards: float
    expanded: float

    def scaled(self, share: float) -> Drafted:
        """Return the same step if only this share of the draft's tokens were accepted."""
        return Drafted(self.nodes, 1 + share * (self.tokens - 1), self.forwards, self.expanded)


PLAIN = Drafted(0, 1, 0, 0)
"""A step without speculation."""


def measured(method: str, temperature: float) -> list[Drafted]:
    """Return what was measured of a method, by rising number of nodes.

    Raises:
        ValueError: if no result has the method at that temperature.
    """
    found: dict[int, Drafted] = {}
    for name in FILES:
        for cell in _cells(name):
            if cell["method"] == method and cell["temperature"] == temperature:
                found[cell["budget"]] = Drafted(
                    cell["nodes_per_step"],
                    cell["tokens_per_step"],
                    cell["draft_forwards_per_step"],
                    cell["draft_rows_per_step"],
                )
    if not found:
        raise ValueError(f"no result has method {method} at temperature {temperature:g}")
    return [found[budget] for budget in sorted(found)]


def by_depth(method: str, temperature: float) -> list[Drafted]:
    """Return what ``python -m benchmarks.depths`` measured of trees of every size and depth, or of
    chains. A step makes all forwards of its depth, as it does where the host cannot see the tree.

    Raises:
        ValueError: if the method was not measured at that temperature.
    """
    found = [
        Drafted(
            cell["nodes_per_step"],
            cell["tokens_per_step"],
            cell["depth"],
            cell["draft_rows_per_step"],
        )
        for cell in _cells(DEPTHS)
        if cell["method"] == method and cell["temperature"] == temperature
    ]
    if not found:
        raise ValueError(f"{DEPTHS} lacks method {method} at temperature {temperature:g}")
    return found


@cache
def _cells(name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["cells"]
    return cells
