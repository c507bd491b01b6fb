"""The best static tree for a pair: what a dynamic one has to beat at the same budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 64  # the most that the options allow


def trees(acceptance: Sequence[float], budgets: Sequence[int]) -> list[dict[str, Any]]:
    """Return dyntree options of Sequoia's trees (arXiv 2402.12374, section 4.1) of so many nodes.

    ``acceptance``: how often the target takes a node's first child, its second, and so on.
    """
    return [
        {
            "node_budget": nodes,
            "max_depth": min(nodes, MAX_DEPTH),
            "growth": "sequoia",
            "sampling": "best",
            "acceptance": list(acceptance),
        }
        for nodes in budgets
    ]
