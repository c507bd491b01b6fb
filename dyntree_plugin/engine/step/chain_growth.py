"""Growth of drawn chains for requests at a temperature above 0, and of trees for the others."""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import StepGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Perturb
from dyntree_plugin.tree.noise import DRAFT, stream


class ChainGrowth(StepGrowth):
    """A `StepGrowth` that has another one grow, and draws the tokens of chains.

    The noise of a draw is that of the root's position and the draw's place in the chain, so that no
    later step uses it again.
    """

    def __init__(self, growth: StepGrowth, trees: TreeStore, perturb: Perturb) -> None:
        """``growth``: of the same trees, without coupling."""
        self._growth = growth
        self._trees = trees
        self._perturb = perturb

    def start(
        self,
        roots: torch.Tensor,
        temperatures: torch.Tensor,
        classes: torch.Tensor,
        seeds: torch.Tensor,
        chained: torch.Tensor,
    ) -> None:
        self._drawn = temperatures > 0
        self._growth.start(roots, temperatures, classes, seeds, chained | self._drawn)
        self._temperatures, self._roots = temperatures.clone(), roots.clone()
        self._scale = torch.where(self._drawn, self._temperatures, 1.0)[:, None]
        places = torch.arange(self._trees.plan.chain_depth, device=roots.device)
        self._seeds = stream(seeds, DRAFT, places[:, None]).unbind()  # contiguous, for kernels
        self._laws: list[torch.Tensor] = []

    def graft(self, trie: Trie) -> None:
        self._growth.graft(trie)

    def resume(self, requests: int, forwards: int) -> None:
        raise RuntimeError("growth of chains is captured as a whole")

    def pick(self, logits: torch.Tensor, firsts: torch.Tensor | None = None) -> None:
        # A chain has one node in a forward, the first row of its request.
        rows = logits.view(len(self._roots), -1, logits.shape[1])[:, 0].float()
        seeds = self._seeds[len(self._laws)]
        drawn = self._perturb(rows, self._temperatures, seeds, self._roots).argmax(dim=1)
        # A row without a distribution has no child, and its law is not read.
        self._laws.append((rows / self._scale).softmax(dim=1))
        self._growth.pick(logits, torch.where(self._drawn, drawn, -1))

    def expand(self, ancestor_bits: torch.Tensor) -> int | None:
        return self._growth.expand(ancestor_bits)

    @property
    def frontier_values(self) -> torch.Tensor:
        return self._growth.frontier_values

    def finish(self, slots: torch.Tensor) -> torch.Tensor:
        self._trees.put_chain_laws(slots, torch.stack(self._laws, dim=1))
        self._laws = []  # they are large, and the target's forward comes next
        return self._growth.finish(slots)
