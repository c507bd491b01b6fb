"""Best-first growth with a bounded number of draft forwards: the serving default.

Every draft forward expands the ``width`` most valuable nodes of every request that have not
been expanded yet; when the forwards are spent, the ``node_budget`` most valuable candidates are
the tree. A node's value is the product of its path's edge probabilities, as in DySpec
(arXiv 2410.11744, section 4) and OPT-Tree (arXiv 2406.17276); it never rises along a path, so
the most valuable candidates always contain their ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree


@dataclass(frozen=True)
class Frontier:
    """The nodes that the next draft forward runs on, [R, width] each.

    ``ancestors`` int32 [R, width, words] are bits over the scratch columns of the step, own
    column included. Where ``valid`` is false there was nothing left to expand.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    valid: torch.Tensor


class TopKGrowth:
    """One step's growth over R requests. Call ``add`` and ``frontier`` in turn, then ``finish``."""

    def __init__(self, num_requests: int, shape: TreeShape, columns: torch.Tensor) -> None:
        """``columns`` int64 [R]: how many scratch columns each request has room for."""
        device = columns.device
        self.shape = shape
        self._room = columns[:, None]
        scratch = shape.scratch_slots
        size = shape.children * (1 + scratch)
        self._size = 0
        self._values = torch.full((num_requests, size), NO_VALUE, device=device)
        # The values of candidates that may still be expanded.
        self._open = self._values.clone()
        self._tokens = torch.zeros(num_requests, size, dtype=torch.int64, device=device)
        self._depths = torch.ones_like(self._tokens)
        self._parents = torch.full_like(self._tokens, -1)
        # The parent's scratch column. The column behind the last one stands for the root, which
        # belongs to the context and needs no bit.
        self._above = torch.full_like(self._tokens, scratch)
        self._columns = torch.arange(scratch, device=device)
        self._own_bits = _own_bits(self._columns)
        self._bits = torch.zeros(
            num_requests, scratch + 1, self._own_bits.shape[1], dtype=torch.int32, device=device
        )
        self._step = 0
        self._expanded: _Expanded | None = None

    def add(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Add the children of the last frontier, or first of the root (width 1).

        ``tokens`` int64, ``log_probs`` float32 (``-inf``: no such child), both
        [R, width, children].
        """
        num_requests, width, k = tokens.shape
        new = slice(self._size, self._size + width * k)
        self._size = new.stop
        by_parent = (num_requests, width, k)
        self._tokens[:, new].view(by_parent).copy_(tokens)
        values, opened = self._values[:, new].view(by_parent), self._open[:, new].view(by_parent)
        at = self._expanded
        if at is None:
            values.copy_(log_probs)
            if self.shape.max_depth > 1:
                opened.copy_(log_probs)
            return
        values.copy_(at.values[:, :, None] + log_probs)
        may_grow = (at.depths < self.shape.max_depth - 1)[:, :, None]
        opened.copy_(torch.where(may_grow, values, NO_VALUE))
        self._parents[:, new].view(by_parent).copy_(at.nodes[:, :, None])
        self._depths[:, new].view(by_parent).copy_(at.depths[:, :, None] + 1)
        self._above[:, new].view(by_parent).copy_(at.columns[:, None])

    def frontier(self) -> Frontier:
        """Pick the most valuable nodes that may still have children."""
        width = self.shape.width
        now = slice(self._step * width, (self._step + 1) * width)
        self._step += 1
        columns = self._columns[now]
        best = self._open.topk(width, dim=1)
        nodes = best.indices
        valid = (best.values > NO_VALUE) & (columns < self._room)
        self._open.scatter_(1, nodes, NO_VALUE)

        above = self._above.gather(1, nodes)[:, :, None].expand(-1, -1, self._bits.shape[2])
        bits = self._bits.gather(1, above) | self._own_bits[now]
        bits.masked_fill_(~valid[:, :, None], 0)
        self._bits[:, now] = bits

        depths = self._depths.gather(1, nodes)
        values = torch.where(valid, best.values, NO_VALUE)
        self._expanded = _Expanded(nodes, depths, columns, values)
        return Frontier(self._tokens.gather(1, nodes), depths, bits, valid)

    def finish(self) -> TokenTree:
        """Keep the ``node_budget`` most valuable candidates.

        The sort is stable and parents were added before their children, so equal values keep
        parents first.
        """
        budget = self.shape.node_budget
        values, order = self._values.sort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order)
        rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        keep = order[:, :budget]
        values = values[:, :budget]
        kept = values > NO_VALUE
        parent = self._parents.gather(1, keep)
        parents = torch.where(kept & (parent >= 0), rank.gather(1, parent.clamp(min=0)), -1)
        tokens = torch.where(kept, self._tokens.gather(1, keep), 0)
        depths = torch.where(kept, self._depths.gather(1, keep), 1)
        pad = budget - keep.shape[1]
        if pad > 0:
            tokens = torch.nn.functional.pad(tokens, (0, pad))
            parents = torch.nn.functional.pad(parents, (0, pad), value=-1)
            depths = torch.nn.functional.pad(depths, (0, pad), value=1)
            values = torch.nn.functional.pad(values, (0, pad), value=NO_VALUE)
        return TokenTree(tokens, parents, depths, values, kept.sum(dim=1))


@dataclass(frozen=True)
class _Expanded:
    """The last frontier: candidates [R, width], their columns [width], and the values that their
    children start from."""

    nodes: torch.Tensor
    depths: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor


def _own_bits(columns: torch.Tensor) -> torch.Tensor:
    """The bit of each of ``columns`` = 0, 1, …: int32 [columns, words], little endian."""
    words = torch.arange(max(1, -(-columns.shape[0] // 32)), device=columns.device)
    bit = torch.ones_like(columns) << (columns % 32)
    return torch.where(columns[:, None] // 32 == words, bit[:, None], 0).to(torch.int32)
