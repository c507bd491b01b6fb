"""Verification by the papers' rules, which read a tree's draws and the target's distributions.

The walk takes the sampler's processed logits, and separate noise.
"""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import BatchRows, Walked
from dyntree_plugin.engine.papers.draw_store import DrawStore
from dyntree_plugin.engine.papers.logit_rows import WalkedRows
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.rules import DRAWN_RULES


class DrawnWalk:
    """A `TreeWalk` by the plan's rule."""

    reads_logits = True

    def __init__(self, trees: TreeStore, draws: DrawStore, rows: WalkedRows) -> None:
        self._trees = trees
        self._draws = draws
        self._rows = rows

    def __call__(
        self, requests: Requests, rows: BatchRows, processed: torch.Tensor, room: Walked
    ) -> Walked:
        """Verify R requests by the logits after temperature, top-k and penalties; see `TreeWalk`.

        The result has separate memory.
        """
        trees, seeds, gumbel = self._trees, requests.seeds, self._rows.gumbel
        found = self._rows.of(requests, processed.shape[0], rows.forbidden)

        def target(at: torch.Tensor) -> torch.Tensor:
            return found.target(processed, requests.temperature, at)

        depth, children = trees.shape.max_depth, trees.plan.growing.children
        position = found.positions
        levels = position[:, None] + 1 + torch.arange(depth, device=position.device)
        tries = stream(seeds, ACCEPT)[:, None].expand(-1, depth)
        uniforms = uniform(gumbel(tries.flatten(), levels.flatten(), children))
        rule = DRAWN_RULES[trees.plan.rule]
        walk = rule.walk(
            found.tokens,
            self._draws.draws(requests.slots),
            # Not the trees' counts: where draws coincide these tell of the tokens.
            found.room,
            target,
            uniforms.view(len(seeds), depth, children),
        )
        after = position + 1 + walk.lengths
        noise = gumbel(stream(seeds, BONUS), after, processed.shape[1])
        return self._rows.emit(walk.emit(found.tokens, noise), found, requests)
