"""Best-first growth with a bounded number of draft forwards: the serving default.

Every draft forward expands the ``width`` most valuable nodes of every request that have not
been expanded yet. After the last forward the ``node_budget`` most valuable candidates are the
tree. A node's value is the product of its path's edge probabilities, as in DySpec
(arXiv 2410.11744, section 4) and OPT-Tree (arXiv 2406.17276). It never rises along a path, so the
most valuable candidates always contain their ancestors. Children are the draft's best tokens, so
only rules fit that do not reason about draws: sample-and-match, or a greedy target.
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch

from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.growth.base import Frontier, GrowthPlan, GrowthSpec
from dyntree_plugin.tree.growth.pool import CandidatePool
from dyntree_plugin.tree.shape import Sampling, TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree


class TopKGrowth:
    """One step's growth over R requests; see `Growth`."""

    sampling: ClassVar[Sampling] = "best"

    def __init__(
        self, num_requests: int, shape: TreeShape, columns: torch.Tensor, least: float = 0.0
    ) -> None:
        """Start without candidates.

        ``columns`` int64 [R] is the number of scratch columns that each request has room for.
        ``least`` is the least value of a node. The root's best child may have any value.
        """
        self.children = shape.children
        self.widths = shape.widths
        self._node_budget = shape.node_budget
        self._pool = CandidatePool(
            num_requests, self.children, self.widths, columns, shape.max_depth
        )
        # The values of candidates that have not been expanded.
        self._open = self._pool.values.clone()
        self._least = math.log(least) if least > 0 else NO_VALUE

    def limit(self, levels: torch.Tensor) -> None:
        """Grow no node deeper than ``levels`` int64 [R], at least 1; call it after the start."""
        self._pool.levels = levels[:, None]

    def graft(self, trie: Trie, log_chances: torch.Tensor, whole_paths: bool = True) -> None:
        """Add the nodes of ``trie``, whose edges have ``log_chances`` float [R, T].

        Call it after the start and before the first ``add``. The draft may expand the nodes, and
        judges those below the nodes that it expands. Nodes below ``max_depth`` are dropped.
        Without any ``add`` the tree is made of the trie alone.

        With ``whole_paths`` one forward may run a node and its child, which sees it by its
        ancestor bits. A draft whose rows read the outputs of their parents' rows cannot do that.

        Raises:
            ValueError: if it comes too late or twice, or the trie is malformed.
        """
        self._pool.graft(trie, log_chances, whole_paths)
        self._open = self._pool.values.clone()

    def asked(self) -> torch.Tensor | None:
        """Return which node of the last frontier judges each node of the trie, int64 [R, T].

        It is -1 for nodes of the trie that none of them judges, and None without a trie.
        """
        new, grafts = self._pool.new, self._pool.grafts
        return None if grafts is None else grafts.asked(new.start, new.stop - new.start)

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
        judged: torch.Tensor | None = None,
    ) -> None:
        """Add the children of the last frontier; see `Growth.add`.

        ``judged`` [R, T] are log chances of the nodes of the trie that were `asked` for, NaN where
        the draft has no judgement. Other nodes' are not read.
        """
        if distributions is not None:
            raise ValueError("distributions are for growths that draw; this takes the best")
        pool, start = self._pool, self._pool.size
        pool.add(tokens, log_probs, judged=judged)
        self._open[:, start : pool.size] = pool.values[:, start : pool.size]
        if pool.grafts is not None:
            # Their values follow the draft's judgement.
            self._open[:, : pool.grafts.size] = pool.grafts.open_values

    def frontier(self) -> Frontier:
        """Pick the most valuable nodes that have no children yet.

        A node gets no children if ``node_budget`` candidates, itself among them, are worth at
        least as much, or if it is worth less than the least value: the tree would not hold them.
        """
        nodes, values = self._most_valuable(self._pool.width)
        worthwhile = (values > NO_VALUE) & (values >= self._least)
        known = self._pool.values[:, : self._pool.size]
        if known.shape[1] >= self._node_budget:
            kept = known.topk(self._node_budget, dim=1, sorted=False).values
            worthwhile &= values > kept.amin(dim=1, keepdim=True)
        # The others come again: they are worth a forward if the trie's nodes lose worth.
        self._open.scatter_(1, nodes, values.masked_fill(worthwhile, NO_VALUE))
        return self._pool.expand(nodes, worthwhile)

    def finish(self) -> TokenTree:
        """Keep the ``node_budget`` most valuable candidates."""
        values = self._pool.values
        ranks = values.masked_fill(values < self._least, NO_VALUE)
        if self._pool.grafts is None:
            ranks[:, 0] = values[:, 0]
        else:
            # Of equals argmax takes the first, and parents come first: a child of the root.
            first = values.argmax(dim=1, keepdim=True)
            ranks.scatter_(1, first, values.gather(1, first))
        return self._pool.tree(ranks, self._node_budget)

    def _most_valuable(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``width`` most valuable open candidates of each request, and their values."""
        known = self._open[:, : max(self._pool.size, width)]
        if self._pool.levels is not None:
            useless = self._pool.depths[:, : known.shape[1]] >= self._pool.levels
            known = known.masked_fill(useless, NO_VALUE)
        if self._pool.grafts is None:
            best = known.topk(width, dim=1)
            return best.indices, best.values
        # One forward may run a trie's node and its child. The stable sort puts parents first, and
        # what stands at the greatest depth has no children.
        deepest = self._pool.depths[:, : known.shape[1]] >= self._pool.max_depth
        values, nodes = known.masked_fill(deepest, NO_VALUE).sort(
            dim=1, descending=True, stable=True
        )
        return nodes[:, :width], values[:, :width]


def plan(shape: TreeShape, sampling: Sampling, min_value: float | None) -> GrowthPlan:
    """Return the plan of a `TopKGrowth`.

    Raises:
        ValueError: if ``min_value`` is no chance above 0.
    """
    if min_value is not None and not 0 < min_value <= 1:
        raise ValueError(f"min_value={min_value} must be above 0 and at most 1")
    start = partial(_start, shape, min_value or 0.0)
    return GrowthPlan(sampling, shape.children, shape.widths, start)


def _start(shape: TreeShape, least: float, num_requests: int, columns: torch.Tensor) -> TopKGrowth:
    return TopKGrowth(num_requests, shape, columns, least)


SPEC = GrowthSpec(
    name="topk",
    summary="the most valuable nodes first, for serving",
    reads=("max_depth", "max_forwards", "width", "children"),
    samplings=("best",),
    plan=plan,
    parameter="min_value",
    ordered=True,
    takes_tries=True,
)
