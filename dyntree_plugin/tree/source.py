"""Sources of a tree's candidates: models that score nodes, and look-ups that bring whole tries.

A node source makes logits by a forward of a model, and growth picks children from them. A trie
source hands over a small finished tree and runs no model for its nodes. One growth can take both:
a node that several sources propose is one node of the tree.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dyntree_plugin.tree.growth.base import Frontier

DRAFT = 1
"""The kind of candidates that the draft model proposes."""


class Emitted(NamedTuple):
    """The tokens that R requests emitted in the last step, all on the device.

    ``roots`` int64 [R] are the positions of the roots of the trees that were verified. ``tokens``
    int64 [R, E] are the tokens emitted behind them, of which the first ``counts`` int32 [R] are
    real. ``rows`` int64 [R, E] is the row of the target's batch in front of each emitted token:
    the root's, then those of the accepted nodes. ``hidden`` [T, H] are the target's hidden states
    of that batch, None where no source reads them.
    """

    roots: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor | None = None


class NodeSource(Protocol):
    """A model that scores the tokens below nodes, over rows that see a tree.

    ``kind`` is a bit that marks its candidates, and is no other source's.
    """

    kind: int

    def follow(self, emitted: Emitted) -> torch.Tensor:
        """Read the emitted tokens into the cache, and return the logits [R, V] behind the last."""

    def forward(self, frontier: Frontier) -> torch.Tensor:
        """Return the logits [R * width, V] behind the frontier's nodes."""


class Trie(NamedTuple):
    """T nodes for each of R requests, parents first; all are [R, T].

    ``tokens`` are int64. ``above`` int64 is the index of a node's parent, -1 for the root.
    ``log_chances`` float32 is the log of the chance that the target takes a node if it gets to
    the node's parent. ``exists`` bool marks real nodes. What is below a node that does not exist
    does not exist either. Children of one node carry different tokens. A request whose tree must
    be a path has no nodes here, since the draft may propose another path.
    """

    tokens: torch.Tensor
    above: torch.Tensor
    log_chances: torch.Tensor
    exists: torch.Tensor


class TrieSource(Protocol):
    """A source of tries, such as a look-up of earlier text or a model that drafts whole blocks.

    ``kind`` is a bit that marks its candidates, and is no other source's.
    """

    kind: int

    def trie(self, emitted: Emitted) -> Trie:
        """Return the trie below each request's last emitted token, of the same size every time."""
