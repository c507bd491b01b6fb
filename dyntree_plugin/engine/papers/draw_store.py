"""What is known of the draws of the trees and chains at each slot, beside the trees themselves."""

from __future__ import annotations

import torch

from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import Draws


class DrawStore:
    """The draws of trees and of chains, by request slot. The last slot is for padding requests."""

    def __init__(
        self,
        num_slots: int,
        plan: TreePlan,
        vocabulary: int,
        device: torch.device,
        *,
        trees: bool = False,
    ) -> None:
        """``vocabulary``: entries of the draft's distributions. ``trees``: whether requests at a
        temperature above 0 have drawn trees, and not chains."""
        slots = num_slots + 1
        rows = plan.shape.node_budget + 1 if plan.reads_draws else 0
        self._draws = torch.full(
            (slots, rows, plan.growing.children), -1, dtype=torch.int64, device=device
        )
        self._log_draft = torch.zeros(slots, rows, vocabulary, device=device)
        places = 1 + sum(plan.growing.widths) if trees else plan.chain_depth
        self.laws = torch.zeros(slots, places, vocabulary, device=device)
        """Distributions that tokens were drawn from, float32 [slots, places, V]: by place in a
        chain, or by expansion of a tree. Places that a step does not reach hold earlier ones."""
        self.trees = trees
        place = torch.arange(plan.shape.node_budget, device=device).clamp(max=max(0, places - 1))
        self.origins = place.repeat(slots, 1)
        """Which of the distributions the nodes were drawn from, int64 [slots, N]: those of chains
        in their order; growth says it of those of trees."""

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
        self.laws[slots, place] = law
