"""What is known of the draws of the trees and chains at each slot, beside the trees themselves."""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import DraftDistributions, Drawing
from dyntree_plugin.tree.noise import DRAFT, stream
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import Draws


class DrawStore:
    """The draws of trees, by request slot. The last slot is for padding requests."""

    def __init__(
        self,
        num_slots: int,
        plan: TreePlan,
        vocabulary: int,
        device: torch.device,
        kept_tokens: int,
    ) -> None:
        """``vocabulary``: entries of the draft's distributions. ``kept_tokens``: draft tokens
        kept per distribution."""
        slots = num_slots + 1
        rows = plan.shape.node_budget + 1 if plan.reads_draws else 0
        self._draws = torch.full(
            (slots, rows, plan.growing.children), -1, dtype=torch.int64, device=device
        )
        self._log_draft = torch.zeros(slots, rows, vocabulary, device=device)
        expansions = 1 + sum(plan.growing.widths) if plan.draws else 0
        chances = torch.zeros(slots, expansions, min(kept_tokens, vocabulary), device=device)
        self.distributions = DraftDistributions(
            torch.full_like(chances, -1, dtype=torch.int32), chances
        )
        """What the nodes of trees with exactness distribution were drawn from. Expansions that a
        step does not reach hold earlier ones."""
        self.origins = torch.zeros(slots, plan.shape.node_budget, dtype=torch.int64, device=device)
        """Which of these each node was drawn from, int64 [slots, N]."""

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

    def drawing(self, *, chains: bool) -> Drawing:
        """Return where growth says how it draws trees, or ``chains``."""

        def seeds(of_requests: torch.Tensor, expansions: torch.Tensor) -> torch.Tensor:
            return stream(of_requests, DRAFT, expansions)

        return Drawing(self.distributions, self.origins, seeds, chains)
