"""Verification of drawn trees by traversal: what its kernels share.

`tree/traversal.py` of the plugin has the rule of verification, and says where it comes from.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dyntree_kernels.contracts import BatchRows


class DrawnTrees(NamedTuple):
    """How the trees of R requests of a batch were drawn, and the seeds of the noise that decides.

    ``laws`` and ``origins`` as in `Drawing`. ``counts`` int64 [slots]: nodes of the trees.
    ``accepting`` int64 [R]: seeds of the noise that accepts nodes, by row of the tree. ``emitting``
    int64 [R]: seeds of the noise that draws the token after them. The position of all noise is the
    root's. ``parents`` int64 [slots, N]. ``levels``: the most levels of a tree.
    """

    laws: torch.Tensor
    counts: torch.Tensor
    accepting: torch.Tensor
    emitting: torch.Tensor
    parents: torch.Tensor
    origins: torch.Tensor
    levels: int


class DecideTrees(Protocol):
    """Decides which nodes of each drawn tree are accepted, and draws the token after them."""

    def __call__(self, rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        """Write the outcome into ``rows``, as `DecideBlocks` does for chains.

        ``rows.forbidden`` gets all children of the last accepted node. A tree whose first node is
        forbidden is not verified.

        Raises:
            ValueError: for rows without ``forbidden``, or if draft and target differ in the number
                of tokens.
        """
        ...
