"""Verification where requests at a temperature above 0 have drawn chains, and others trees.

Chains take the sampler's processed logits, and noise of their own: it is that of the root's
position, so no later step uses it again.
"""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import Walked
from dyntree_plugin.engine.step.logit_rows import LogitRows, WalkedRows
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.block import Chains
from dyntree_plugin.tree.match import match
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.drawn import draw
from dyntree_plugin.tree.token_tree import Accepted


class ChainWalk:
    """Accepts chains as blocks, and the paths of trees that the target's samples follow."""

    def __init__(self, trees: TreeStore, rows: WalkedRows) -> None:
        self._trees = trees
        self._rows = rows

    def __call__(
        self,
        requests: Requests,
        sampled: torch.Tensor,
        logits: torch.Tensor,
        forbidden: torch.Tensor | None,
    ) -> Walked:
        """Verify R requests.

        ``sampled`` int64 [rows]: the target's token at every row. ``logits`` [rows, V]: those after
        temperature, top-k and penalties. ``forbidden``: as in `WalkedRows.of`.
        """
        rows = self._rows.of(requests, logits.shape[0], forbidden)
        of_trees = self._matched(requests, rows, sampled)
        of_chains = self._accepted(requests, rows, logits)
        drawn = requests.temperature > 0

        def either(chains: torch.Tensor, trees: torch.Tensor) -> torch.Tensor:
            return torch.where(drawn.view(-1, *[1] * (trees.dim() - 1)), chains, trees)

        accepted = Accepted(
            either(of_chains.path, of_trees.path),
            either(of_chains.lengths, of_trees.lengths),
            either(of_chains.tokens, of_trees.tokens),
        )
        return self._rows.emit(accepted, rows, requests)

    def _matched(self, requests: Requests, rows: LogitRows, sampled: torch.Tensor) -> Accepted:
        trees, slots = self._trees, requests.slots
        nodes = torch.arange(trees.shape.node_budget, device=sampled.device)
        return match(
            rows.tokens,
            trees.parents[slots],
            trees.depths[slots],
            trees.ancestors[slots],
            nodes < rows.counts[:, None],
            sampled[rows.root_and_nodes],
            trees.shape.max_depth,
        )

    def _accepted(self, requests: Requests, rows: LogitRows, logits: torch.Tensor) -> Accepted:
        trees, seeds, positions = self._trees, requests.seeds, rows.positions
        depth, levels = trees.plan.chain_depth, trees.shape.max_depth
        # Of a tree the first nodes are taken for a chain, and the result is not used.
        tokens, counts = rows.tokens[:, :depth], rows.counts.clamp(max=depth)
        # Behind a chain's end stand tokens of other requests, which may be no entries.
        places = torch.arange(depth, device=tokens.device)
        tokens = torch.where(places < counts[:, None], tokens, 0)
        target = logits[rows.root_and_nodes[:, : depth + 1]].float().softmax(dim=2)
        chains = Chains(tokens, counts, trees.chain_laws(requests.slots), target)
        found = chains.chances()
        lengths = found.accepted(
            uniform(self._rows.gumbel(stream(seeds, ACCEPT), positions, depth))
        )
        law = chains.next_law(found, lengths)
        last = draw(law, self._rows.gumbel(stream(seeds, BONUS), positions, logits.shape[1]))
        places = torch.arange(levels, device=lengths.device)
        path = torch.where(places < lengths[:, None], places, -1)
        along = torch.nn.functional.pad(tokens, (0, levels + 1 - depth))
        return Accepted(path, lengths, along.scatter(1, lengths[:, None], last[:, None]))
