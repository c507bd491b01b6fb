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
        self._forwards = 0
        scratch = shape.scratch_slots
        size = shape.children * (1 + scratch)
        self._values = torch.full((num_requests, size), NO_VALUE, device=device)
        self._open = torch.zeros(num_requests, size, dtype=torch.bool, device=device)
        self._tokens = torch.zeros(num_requests, size, dtype=torch.int64, device=device)
        self._depths = torch.ones_like(self._tokens)
        self._parents = torch.full_like(self._tokens, -1)
        # A candidate's scratch column once it is expanded. The column behind the last one stands
        # for the root, which belongs to the context and needs no bit.
        self._column_of = torch.full_like(self._tokens, scratch)
        self._columns = torch.arange(scratch, device=device)
        self._own_bits = _own_bits(self._columns)
        self._bits = torch.zeros(
            num_requests, scratch + 1, self._own_bits.shape[1], dtype=torch.int32, device=device
        )
        self._expanded: torch.Tensor
        self._valid: torch.Tensor

    def add(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Add the children of the last frontier, or first of the root (width 1).

        ``tokens`` int64, ``log_probs`` float32 (``-inf``: no such child), both
        [R, width, children].
        """
        k, width = self.shape.children, self.shape.width
        begin = k * (1 + (self._forwards - 1) * width) if self._forwards else 0
        new = slice(begin, begin + k * tokens.shape[1])
        self._tokens[:, new] = tokens.flatten(1)
        if self._forwards == 0:
            self._values[:, new] = log_probs.flatten(1)
            self._open[:, new] = self.shape.max_depth > 1
        else:
            parent = self._expanded
            above = torch.where(self._valid, self._values.gather(1, parent), NO_VALUE)
            depth = self._depths.gather(1, parent) + 1
            by_parent = (-1, -1, k)
            self._values[:, new] = (above[:, :, None] + log_probs).flatten(1)
            self._parents[:, new] = parent[:, :, None].expand(by_parent).flatten(1)
            self._depths[:, new] = depth[:, :, None].expand(by_parent).flatten(1)
            may_grow = depth < self.shape.max_depth
            self._open[:, new] = may_grow[:, :, None].expand(by_parent).flatten(1)
        self._forwards += 1

    def frontier(self) -> Frontier:
        """Pick the most valuable nodes that may still have children."""
        width = self.shape.width
        now = slice((self._forwards - 1) * width, self._forwards * width)
        column = self._columns[now]
        best = torch.where(self._open, self._values, NO_VALUE).topk(width, dim=1)
        node = best.indices
        valid = (best.values > NO_VALUE) & (column < self._room)

        parent = self._parents.gather(1, node)
        column_above = self._column_of.gather(1, parent.clamp(min=0))
        above = torch.where(parent < 0, self.shape.scratch_slots, column_above)
        bits = self._bits.gather(1, above[:, :, None].expand(-1, -1, self._bits.shape[2]))
        bits = torch.where(valid[:, :, None], bits | self._own_bits[now], 0)
        self._bits[:, now] = bits

        self._open.scatter_(1, node, False)
        column_of = torch.where(valid, column, self._column_of.gather(1, node))
        self._column_of.scatter_(1, node, column_of)
        self._expanded, self._valid = node, valid
        return Frontier(self._tokens.gather(1, node), self._depths.gather(1, node), bits, valid)

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


def _own_bits(columns: torch.Tensor) -> torch.Tensor:
    """The bit of each of ``columns`` = 0, 1, …: int32 [columns, words], little endian."""
    words = torch.arange(max(1, -(-columns.shape[0] // 32)), device=columns.device)
    bit = torch.ones_like(columns) << (columns % 32)
    return torch.where(columns[:, None] // 32 == words, bit[:, None], 0).to(torch.int32)
