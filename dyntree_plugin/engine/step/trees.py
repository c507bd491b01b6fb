"""The trees on the device that the next step verifies, one per request slot."""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import DRAFT, TreeArrays
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree
from dyntree_plugin.tree.value import FEATURES


class PlacedTrees:
    """The part of the trees that places their nodes, by request slot.

    ``depths`` int64 [slots + 1, N]; ``ancestors`` int32 [slots + 1, N + 1, words]. The last slot,
    ``spare``, is for padding requests.
    """

    def __init__(self, num_slots: int, nodes: int, device: torch.device) -> None:
        self.spare = num_slots
        self.words = -(-(nodes + 1) // 32)
        self.depths = torch.ones(num_slots + 1, nodes, dtype=torch.int64, device=device)
        self.ancestors = torch.zeros(
            num_slots + 1, nodes + 1, self.words, dtype=torch.int32, device=device
        )
        # A slot that never had a tree has one without nodes, whose root sees itself.
        self.ancestors[:, 0, 0] = 1

    def put_places(
        self, slots: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor
    ) -> None:
        """Store this part of the trees of R requests at ``slots`` int64 [R]."""
        self.depths[slots] = depths
        self.ancestors[slots] = ancestors


class TreeStore(PlacedTrees):
    """Trees by request slot. A cleared slot holds padding only.

    Node tokens are not here: vLLM keeps them in ``req_states.draft_tokens``, and verification
    reads them from the rows that the model ran on, so tree and KV cache cannot disagree.
    """

    def __init__(
        self, num_slots: int, plan: TreePlan, vocabulary: int, device: torch.device
    ) -> None:
        """``vocabulary``: entries of the draft's distributions, which some rules read."""
        nodes = plan.shape.node_budget
        super().__init__(num_slots, nodes, device)
        num_slots += 1
        self.plan = plan
        self.vocabulary = vocabulary
        self.shape = plan.shape
        self.parents = torch.full((num_slots, nodes), -1, dtype=torch.int64, device=device)
        self.values = torch.full((num_slots, nodes), NO_VALUE, device=device)
        self.counts = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.grown = torch.zeros_like(self.counts)
        # Nodes that the scheduler is offered. Verification does not read it.
        self.admitted = torch.zeros_like(self.counts)
        self.features = torch.zeros(
            num_slots, nodes if plan.calibrated else 0, FEATURES, device=device
        )
        self.kinds = torch.zeros(num_slots, nodes, dtype=torch.int8, device=device)
        self.forwards = torch.zeros_like(self.parents)

    @property
    def arrays(self) -> TreeArrays:
        """The same tensors, for the kernels."""
        return TreeArrays(*(getattr(self, name) for name in TreeArrays._fields))

    def put(
        self,
        slots: torch.Tensor,
        tree: TokenTree,
        features: torch.Tensor | None = None,
    ) -> None:
        """Store the ``tree`` of R requests at ``slots`` int64 [R], whose nodes a draft proposed.

        ``features`` float32 [R, candidates, FEATURES]: those of the candidates that the tree was
        grown from.
        """
        self.parents[slots] = tree.parents
        self.values[slots] = tree.values
        self.counts[slots] = tree.counts
        self.admitted[slots] = tree.counts
        self.grown[slots] = tree.counts if tree.grown is None else tree.grown
        self.put_places(slots, tree.depths, tree.ancestors())
        self.kinds.index_fill_(0, slots, DRAFT)
        # After the root's, a forward for every level above; see `TreeArrays`.
        self.forwards[slots] = tree.depths - 1
        if features is not None and tree.candidates is not None:
            index = tree.candidates[:, :, None].expand(-1, -1, FEATURES)
            self.features[slots] = features.gather(1, index)

    def parents_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the number of nodes of the trees at ``slots`` int64 [R], then their parents,
        int64 [R, 1 + N]."""
        return torch.cat([self.counts[slots][:, None], self.parents[slots]], dim=1)

    def admit(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """Offer the scheduler the first ``counts`` int64 [R] nodes of the trees at ``slots``."""
        self.admitted[slots] = counts

    def clear(self, slots: torch.Tensor) -> None:
        """Forget the trees at ``slots`` int64 [R], which new requests take."""
        self.counts.index_fill_(0, slots, 0)
        self.admitted.index_fill_(0, slots, 0)
        self.grown.index_fill_(0, slots, 0)
