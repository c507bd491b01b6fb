"""The rules that reason about draws, by name."""

from __future__ import annotations

from typing import Final

from dyntree_plugin.tree.papers.drawn import DrawnRule
from dyntree_plugin.tree.registry import RULES

DRAWN_RULES: Final[dict[str, DrawnRule]] = {
    spec.name: spec.drawn for spec in RULES.values() if spec.drawn is not None
}
