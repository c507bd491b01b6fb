"""Candidates that need no forward: a trie source brings a small finished tree.

A node that a trie source and the draft both propose is one node of the tree.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

DRAFT = 1
"""The kind of candidates that the draft model proposes."""


class Trie(NamedTuple):
    """T nodes for each of R requests, parents first; all are [R, T].

    ``tokens`` are int64. ``above`` int64 is the index of a node's parent, -1 for the root.
    ``log_chances`` float32 is the log of the chance that the target takes a node if it gets to
    the node's parent. ``exists`` bool marks real nodes. What is below a node that does not exist
    does not exist either. Children of one node carry different tokens.
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

    def trie(self, slots: torch.Tensor, roots: torch.Tensor) -> Trie:
        """Return the trie below each request's root, of the same size every time.

        ``slots`` int64 [R] are the requests' places in vLLM's states, -1 for padding. ``roots``
        int64 [R] are the positions of the last emitted tokens.
        """
        ...
