"""The trees that wait on the device to be verified, one per request slot."""

from __future__ import annotations

import torch

from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree


class TreeStore:
    """Trees by request slot. A slot whose tree was cleared holds padding only.

    Node tokens are not here: vLLM keeps them in ``req_states.draft_tokens``, and verification
    reads them from the rows that the model ran on, so tree and KV cache cannot disagree.
    """

    def __init__(self, num_slots: int, shape: TreeShape, device: torch.device) -> None:
        nodes = shape.node_budget
        self.shape = shape
        self.words = -(-(nodes + 1) // 32)
        self.parents = torch.full((num_slots, nodes), -1, dtype=torch.int64, device=device)
        self.depths = torch.ones_like(self.parents)
        self.values = torch.full((num_slots, nodes), NO_VALUE, device=device)
        self.counts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.ancestors = torch.zeros(
            num_slots, nodes + 1, self.words, dtype=torch.int32, device=device
        )

    def put(self, slots: torch.Tensor, tree: TokenTree) -> None:
        """Store ``tree`` of R requests at ``slots`` int64 [R]."""
        self.parents[slots] = tree.parents
        self.depths[slots] = tree.depths
        self.values[slots] = tree.values
        self.counts[slots] = tree.counts
        self.ancestors[slots] = tree.ancestors()

    def clear(self, slot: int) -> None:
        """Forget the tree of a slot that a new request takes over."""
        self.counts[slot] = 0
