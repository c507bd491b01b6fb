"""What rules that read draws know of the trees at each slot, beside the trees themselves."""

from __future__ import annotations

import torch

from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import Draws


class DrawStore:
    """The draws of trees and of chains, by request slot. The last slot is for padding requests."""

    def __init__(
        self, num_slots: int, plan: TreePlan, vocabulary: int, device: torch.device
    ) -> None:
        """``vocabulary``: entries of the draft's distributions."""
        slots = num_slots + 1
        rows = plan.shape.node_budget + 1 if plan.reads_draws else 0
        self._draws = torch.full(
            (slots, rows, plan.growing.children), -1, dtype=torch.int64, device=device
        )
        self._log_draft = torch.zeros(slots, rows, vocabulary, device=device)
        self.chain_laws = torch.zeros(slots, plan.chain_depth, vocabulary, device=device)
        """Distributions that chains' tokens were drawn from, float32 [slots, D, V]. Places after
        the last draft forward hold those of an earlier step."""

    def put(self, slots: torch.Tensor, draws: Draws) -> None:
        """Store how the trees of R requests at ``slots`` int64 [R] were drawn."""
        request = torch.arange(len(slots), device=slots.device)[:, None]
        self._draws[slots] = draws.nodes
        self._log_draft[slots] = draws.log_probs[request, draws.columns]

    def draws(self, slots: torch.Tensor) -> Draws:
        """Return how the trees at ``slots`` int64 [R] were drawn."""
        nodes = self._draws[slots]
        columns = torch.arange(nodes.shape[1], device=slots.device).expand(nodes.shape[:2])
        return Draws(nodes, columns, self._log_draft[slots])

    def put_chain_law(self, slots: torch.Tensor, place: int, law: torch.Tensor) -> None:
        """Store what the tokens at one ``place`` of the chains at ``slots`` int64 [R] were drawn
        from: the draft's distributions ``law`` float32 [R, V]."""
        self.chain_laws[slots, place] = law
