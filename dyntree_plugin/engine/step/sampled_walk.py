"""The walk of verification: it accepts a path of each tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dyntree_plugin.engine.step.trees import TreeStore

if TYPE_CHECKING:
    import torch

    from dyntree_kernels.contracts import BatchRows, Walk, Walked
    from dyntree_plugin.engine.step.requests import Requests


class TreeWalk(Protocol):
    """Accepts a path of the tree of each request of a batch."""

    @property
    def reads_logits(self) -> bool:
        """Whether it reads the sampler's processed logits. Then it has no graph."""
        ...

    def __call__(
        self, requests: Requests, rows: BatchRows, processed: torch.Tensor, room: Walked
    ) -> Walked:
        """Return the accepted paths of R requests.

        ``processed`` [L, V]: the sampler's processed logits of the rows, empty unless the walk
        reads them. ``room``: memory for the result.
        """
        ...


class SampledWalk:
    """Accepts the children that are the target's samples at their parents."""

    reads_logits = False

    def __init__(self, trees: TreeStore, walk: Walk) -> None:
        self._trees = trees
        self._walk = walk
        self.ranked = trees.plan.budget == "adaptive"
        """Whether the report has the value of every node."""

    def __call__(
        self, requests: Requests, rows: BatchRows, processed: torch.Tensor, room: Walked
    ) -> Walked:
        self._walk(rows, self._trees.arrays, room, ranked=self.ranked)
        return room
