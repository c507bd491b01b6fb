"""Candidates by forwards of a model: what a node source does in a step."""

from __future__ import annotations

from typing import Protocol

import torch

from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import TreeRows


class NodeSource(Protocol):
    """Models that make logits by forwards over rows that see a tree, in vLLM's paged cache.

    Its state between two calls lies at fixed addresses, so that each call can be a graph.
    """

    kept: tuple[torch.Tensor, ...]
    """What `root_logits` leaves for `forward`, with R entries each, where that is not in memory of
    the source; a graph keeps it."""

    @property
    def shift(self) -> int:
        """Position of a row, less that of its token: 0, or -1 for a source that reads the target's
        hidden state before the token."""
        ...

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy what `follow` reads of the target's hidden states."""
        ...

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Read the emitted tokens, the last of which are the new roots; all requests decode."""
        ...

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are read as well.

        It has no graph.
        """
        ...

    def root_logits(self, requests: int) -> torch.Tensor:
        """Return the logits after the roots: [R, V], or [R * D, V] of D trees apart."""
        ...

    def forward(self, rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        """Run the models over filled rows; return the logits of all of them, [R * width, V].

        ``first``: the expansion of each request's first row, 1 in the first forward.
        """
        ...
