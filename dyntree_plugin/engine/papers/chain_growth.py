"""Growth of drawn chains for requests at a temperature above 0, and of trees for the others."""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import StepGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Perturb
from dyntree_plugin.tree.noise import DRAFT, stream


class ChainGrowth(StepGrowth):
    """Draws the tokens of chains, and has another growth do everything else.

    The noise of a draw is that of the root's position and the draw's place in the chain, so no
    later step uses it again. What passes from one call to the next lies at fixed addresses.
    """

    def __init__(
        self, growth: StepGrowth, trees: TreeStore, perturb: Perturb, stored_at: torch.Tensor
    ) -> None:
        """``growth``: of the same trees, without coupling. ``stored_at``: as in `DraftStages`."""
        self._growth = growth
        self._trees = trees
        self._perturb = perturb
        self._stored_at = stored_at
        self._places = torch.arange(trees.plan.chain_depth, device=stored_at.device)
        self._roots = torch.zeros_like(stored_at)
        self._temperatures = torch.zeros_like(stored_at, dtype=torch.float32)
        # For each place in a chain; kernels read rows without gaps.
        self._seeds = stored_at.new_zeros(len(self._places), len(stored_at))
        self._requests = self._place = 0

    @property
    def resumable(self) -> bool:
        return self._growth.resumable

    def start(
        self,
        roots: torch.Tensor,
        temperatures: torch.Tensor,
        classes: torch.Tensor,
        seeds: torch.Tensor,
        chained: torch.Tensor,
        levels: torch.Tensor,
    ) -> None:
        chained = chained | (temperatures > 0)
        self._growth.start(roots, temperatures, classes, seeds, chained, levels)
        self._requests, self._place = len(roots), 0
        self._roots[: len(roots)].copy_(roots)
        self._temperatures[: len(roots)].copy_(temperatures)
        self._seeds[:, : len(roots)].copy_(stream(seeds, DRAFT, self._places[:, None]))

    def graft(self, trie: Trie) -> None:
        self._growth.graft(trie)

    def resume(self, requests: int, forwards: int) -> None:
        self._growth.resume(requests, forwards)
        self._requests, self._place = requests, forwards

    def pick(self, logits: torch.Tensor, firsts: torch.Tensor | None = None) -> None:
        here = slice(self._requests)
        # A chain has one node in a forward, the first row of its request.
        rows = logits.view(self._requests, -1, logits.shape[1])[:, 0].float()
        temperatures, seeds = self._temperatures[here], self._seeds[self._place, here]
        tokens = self._perturb(rows, temperatures, seeds, self._roots[here]).argmax(dim=1)
        drawn = temperatures > 0
        # A row without a distribution has no child, and its law is not read.
        law = (rows / torch.where(drawn, temperatures, 1.0)[:, None]).softmax(dim=1)
        self._trees.put_chain_law(self._stored_at[here], self._place, law)
        self._growth.pick(logits, torch.where(drawn, tokens, -1))

    def expand(self, ancestor_bits: torch.Tensor) -> int | None:
        self._place += 1
        return self._growth.expand(ancestor_bits)

    @property
    def frontier_values(self) -> torch.Tensor:
        return self._growth.frontier_values

    def finish(self, slots: torch.Tensor) -> torch.Tensor:
        return self._growth.finish(slots)
