"""Drafted trees on their way from the worker to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.outputs import DraftTokenIds


@dataclass
class TreeDrafts(DraftTokenIds):
    """Drafts whose order says that parents precede their children.

    ``parents``: for each request those of its nodes, -1 for the root. Drafts after the last node
    are padding.
    """

    parents: list[list[int]] = field(default_factory=list)
