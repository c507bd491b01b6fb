"""Growth of drawn chains for requests at a temperature above 0, and of trees for the others."""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import StepGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.papers.draw_store import DrawStore
from dyntree_plugin.engine.step.rows import GrowthMemory
from dyntree_plugin.tree.children import Perturb
from dyntree_plugin.tree.noise import DRAFT, stream


class ChainGrowth(StepGrowth):
    """Draws the tokens of chains, and has another growth do everything else.

    The noise of a draw is that of the root's position and the draw's place in the chain, so no
    later step uses it again. What passes from one call to the next lies at fixed addresses.
    """

    def __init__(
        self, growth: StepGrowth, draws: DrawStore, perturb: Perturb, memory: GrowthMemory
    ) -> None:
        """``growth``: in the same ``memory``, without coupling."""
        self._growth = growth
        self._draws = draws
        self._perturb = perturb
        self._of_requests = memory.of_requests
        places, seeds = draws.laws.shape[1], memory.of_requests.seeds
        self._places = torch.arange(places, device=seeds.device)
        # For each place in a chain; kernels read rows without gaps.
        self._seeds = seeds.new_zeros(places, len(seeds))
        self._requests = self._place = 0

    @property
    def resumable(self) -> bool:
        return self._growth.resumable

    def start(self, requests: int) -> None:
        of = self._of_requests.first(requests)
        of.chained.logical_or_(of.temperatures > 0)
        self._growth.start(requests)
        self._requests, self._place = requests, 0
        self._seeds[:, :requests].copy_(stream(of.seeds, DRAFT, self._places[:, None]))

    def graft(self, trie: Trie) -> None:
        self._growth.graft(trie)

    def resume(self, requests: int, forwards: int) -> None:
        self._growth.resume(requests, forwards)
        self._requests, self._place = requests, forwards

    def pick(self, logits: torch.Tensor, firsts: torch.Tensor | None = None) -> None:
        of = self._of_requests.first(self._requests)
        # A chain has one node in a forward, the first row of its request.
        rows = logits.view(self._requests, -1, logits.shape[1])[:, 0].float()
        seeds, drawn = self._seeds[self._place, : self._requests], of.temperatures > 0
        tokens = self._perturb(rows, of.temperatures, seeds, of.roots).argmax(dim=1)
        # A row without a distribution has no child, and its distribution is not read.
        law = (rows / torch.where(drawn, of.temperatures, 1.0)[:, None]).softmax(dim=1)
        self._draws.put_chain_law(of.slots, self._place, law)
        self._growth.pick(logits, torch.where(drawn, tokens, -1))

    def expand(self, ancestor_bits: torch.Tensor) -> int | None:
        self._place += 1
        return self._growth.expand(ancestor_bits)

    @property
    def frontier_values(self) -> torch.Tensor:
        return self._growth.frontier_values

    def finish(self) -> torch.Tensor:
        return self._growth.finish()
