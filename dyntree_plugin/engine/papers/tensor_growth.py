"""Growths of papers, driven as compiled growth is: a `StepGrowth` in plain torch."""

from __future__ import annotations

from itertools import accumulate

import torch

from dyntree_kernels.contracts import StepGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.step.rows import PAD_SLOT, GrowthMemory
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker, DraftRows
from dyntree_plugin.tree.growth.base import Growth
from dyntree_plugin.tree.token_tree import NO_VALUE


class TensorGrowth(StepGrowth):
    """Grow the trees of a plan with the plan's growth, and store them.

    Its state is made anew by every `start`, so that it can be captured only as a whole.
    """

    def __init__(
        self,
        trees: TreeStore,
        pick: ChildPicker,
        memory: GrowthMemory,
        draws: DrawStore | None = None,
    ) -> None:
        """``draws``: where draws are stored; None for a plan that reads none."""
        self._trees = trees
        self._draws = draws
        self._every = memory.of_requests
        self._pick = pick
        self._rows = memory.rows
        self._last_position = memory.last_position
        self._shift = trees.plan.shape.shift
        self._growing = trees.plan.growing
        if self._growing.start is None:
            raise ValueError(f"growth={trees.plan.growth.name} is compiled, and not in plain torch")
        self._start = self._growing.start
        self._ends = list(accumulate(self._growing.widths))

    @property
    def resumable(self) -> bool:
        return False

    def start(self, requests: int) -> None:
        roots, temperatures, classes, seeds, chained, _, slots = self._every.first(requests)
        self._roots = roots
        self._slots = slots
        self._chained = chained
        # By the nodes that each request has in a forward.
        of_requests = (temperatures, classes, seeds, chained)
        self._of_rows = {
            width: tuple(each.repeat_interleave(width) for each in of_requests)
            for width in {self._growing.roots, *self._growing.widths}
        }
        on_host = roots.device.type == "cpu"
        self._greedy = on_host and not bool(temperatures.any())  # sync: host memory on the CPU
        # No tree ends at a request's level: rules that read draws need whole ones.
        self._growth: Growth = self._start(len(roots), self._last_position - roots)
        self._features: list[torch.Tensor] = []
        self._forward = 0
        self._positions, self._first = roots[:, None].expand(-1, self._growing.roots), 0

    def graft(self, trie: Trie) -> None:
        raise ValueError(f"growth={self._trees.plan.growth.name} takes no tries; growth=topk does")

    def resume(self, requests: int, forwards: int) -> None:
        raise RuntimeError("growth in plain torch is captured as a whole")

    def pick(self, logits: torch.Tensor) -> None:
        num_reqs, width = self._positions.shape
        columns = torch.arange(self._first, self._first + width, device=logits.device)
        temperature, classes, seeds, chained = self._of_rows[width]
        rows = DraftRows(
            temperature, classes, seeds, chained, self._positions.flatten(),
            columns.repeat(num_reqs),
        )  # fmt: skip
        found = self._pick(logits, rows, self._greedy).by_request(num_reqs)
        if self._forward == 0 and width > 1:  # of several trees, a chain keeps the first
            found.log_probs[:, 1:].masked_fill_(chained.view(num_reqs, width, 1)[:, 1:], NO_VALUE)
        if found.features is not None:
            self._features.append(found.features.flatten(1, 2))
        self._growth.add(found.tokens, found.log_probs, found.distributions)

    def expand(self, ancestor_bits: torch.Tensor) -> int | None:
        frontier = self._growth.frontier()
        end, width = self._ends[self._forward], self._growing.widths[self._forward]
        self._forward += 1
        self._first = self._growing.roots + end - width
        deep = self._roots[:, None] + frontier.depths
        self._positions = deep.clamp(max=self._last_position)
        num_reqs = len(self._roots)
        rows = num_reqs * width
        self._rows.ids[:rows].view(num_reqs, width).copy_(frontier.tokens)
        self._rows.positions[:rows].view(num_reqs, width).copy_(self._positions + self._shift)
        expansions = self._growing.roots + self._ends[-1]
        first = torch.arange(num_reqs, device=frontier.above.device)[:, None] * expansions
        self._rows.above[:rows].view(num_reqs, width).copy_(first + frontier.above)
        ancestor_bits.view(num_reqs, width, -1).copy_(frontier.ancestors)
        columns = self._ends[-1]
        scratch = self._rows.scratch[:, : num_reqs * columns].view(-1, num_reqs, columns)
        slots = scratch[:, :, end - width : end].masked_fill(~frontier.valid, PAD_SLOT)
        self._rows.slots[:, :rows].copy_(slots.flatten(1))
        on_host = frontier.valid.device.type == "cpu"
        return int(frontier.valid.sum()) if on_host else None  # sync: host memory on the CPU

    @property
    def frontier_values(self) -> torch.Tensor:
        raise RuntimeError("growths in plain torch do not rank their nodes by value")

    def finish(self) -> torch.Tensor:
        tree = self._growth.finish()
        features = torch.cat(self._features, dim=1) if self._features else None
        self._trees.put(self._slots, tree, features)
        if self._draws is not None and tree.draws is not None:
            self._draws.put(self._slots, tree.draws)
        return tree.tokens
