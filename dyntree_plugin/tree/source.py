"""Candidates that need no forward: a trie source brings a small finished tree.

A node that a trie source and the draft both propose is one node of the tree.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dyntree_kernels.tries import Trie


class TrieSource(Protocol):
    """A source of tries below the ends of the requests' texts, such as a look-up in them.

    What it reads and writes lies at fixed addresses, so that each call can be captured.
    """

    def trie(self, slots: torch.Tensor) -> Trie:
        """Return the tries below the texts' last tokens, of the same size every time.

        ``slots`` int64 [R] are the requests' places in vLLM's states, -1 for padding, which gets
        no nodes. The next call overwrites the tries.
        """
        ...

    def roots(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the positions of the texts' last tokens, int64 [R]; any value for padding."""
        ...
