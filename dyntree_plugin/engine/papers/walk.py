"""Verification by the papers' rules, which read the draws of a tree and the target's laws.

The walk takes the sampler's processed logits, and noise of its own.
"""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import Walked
from dyntree_plugin.engine.papers.logit_rows import WalkedRows
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.rules import DRAWN_RULES


class DrawnWalk:
    """Accept paths by the plan's rule."""

    def __init__(self, trees: TreeStore, rows: WalkedRows) -> None:
        self._trees = trees
        self._rows = rows

    def __call__(
        self, requests: Requests, logits: torch.Tensor, forbidden: torch.Tensor | None
    ) -> Walked:
        """Verify R requests by ``logits`` [rows, V] after temperature, top-k and penalties.

        ``forbidden``: as in `WalkedRows.of`.
        """
        trees, seeds, gumbel = self._trees, requests.seeds, self._rows.gumbel
        rows = self._rows.of(requests, logits.shape[0], forbidden)

        def target(at: torch.Tensor) -> torch.Tensor:
            return rows.target(logits, requests.temperature, at)

        depth, children = trees.shape.max_depth, trees.plan.growing.children
        position = rows.positions
        levels = position[:, None] + 1 + torch.arange(depth, device=position.device)
        tries = stream(seeds, ACCEPT)[:, None].expand(-1, depth)
        uniforms = uniform(gumbel(tries.flatten(), levels.flatten(), children))
        rule = DRAWN_RULES[trees.plan.rule]
        walk = rule.walk(
            rows.tokens,
            trees.draws(requests.slots),
            # Not the trees' counts: where draws coincide these tell of the tokens.
            rows.room,
            target,
            uniforms.view(len(seeds), depth, children),
        )
        after = position + 1 + walk.lengths
        noise = gumbel(stream(seeds, BONUS), after, logits.shape[1])
        return self._rows.emit(walk.emit(rows.tokens, noise), rows, requests)
