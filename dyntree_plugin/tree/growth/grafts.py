"""The nodes of a trie among the candidates of one step, and what the draft makes of them."""

from __future__ import annotations

import torch

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.token_tree import NO_VALUE


class Grafts:
    """T nodes of each of R requests, which are candidates 0 … T - 1 of the step.

    A node's value is its parent's plus the log chance of the edge between them. If the draft runs
    on the root or on a node, it judges the trie's children there: their edges follow its judgement
    from then on. All tensors are [R, T].
    """

    def __init__(
        self,
        trie: Trie,
        log_chances: torch.Tensor,
        max_depth: int,
        dtype: torch.dtype,
        whole_paths: bool = True,
        levels: torch.Tensor | None = None,
    ) -> None:
        """Take over ``trie`` down to ``max_depth``, and down to ``levels`` int64 [R, 1] if they are
        given, with ``log_chances`` [R, T] of its edges.

        ``dtype`` is that of values. ``whole_paths`` says whether one forward may expand a node and
        its child.

        Raises:
            ValueError: if the trie's tensors have different shapes.
        """
        for name, part in (*trie._asdict().items(), ("log_chances", log_chances)):
            if part.dim() != 2 or part.shape != trie.tokens.shape:
                raise ValueError(
                    f"trie.{name} {tuple(part.shape)} must have the shape of trie.tokens "
                    f"{tuple(trie.tokens.shape)}, [requests, nodes]"
                )
        self.size = trie.tokens.shape[1]
        self.tokens = trie.tokens.long()
        self.above = torch.where(trie.exists, trie.above.long(), -1)
        self._index = self.above.clamp(min=0)
        self._ancestors = unpack_bits(ancestor_bits(self.above), self.size)
        self.depths = self._ancestors.sum(dim=2)
        chances = log_chances.to(dtype).clamp(max=0.0).nan_to_num(NO_VALUE, neginf=NO_VALUE)
        self._real = trie.exists & (self.depths <= max_depth)
        if levels is not None:
            self._real &= self.depths <= levels
        self._edges = chances.masked_fill(~self._real, NO_VALUE)
        self._levels = max_depth
        self._whole_paths = whole_paths
        # The expansion of each node; -1 where there is none.
        self._expansions = torch.full_like(self.above, -1)
        self.values = self._path_values()

    @property
    def open_values(self) -> torch.Tensor:
        """Values of the nodes that the next forward may expand, ``-inf`` for the others."""
        closed = self._expansions >= 0
        if not self._whole_paths:
            closed = closed | (self.expansions_above < 0)
        return self.values.masked_fill(closed, NO_VALUE)

    def asked(self, first: int, width: int) -> torch.Tensor:
        """Return which of expansions ``first``, ``first`` + 1, … judges each node.

        The result counts from 0; it is -1 for nodes that none of these ``width`` judges.
        """
        above = self.expansions_above - first
        return torch.where(self._real & (above >= 0) & (above < width), above, -1)

    def merge(
        self, first: int, tokens: torch.Tensor, log_probs: torch.Tensor, judged: torch.Tensor | None
    ) -> torch.Tensor:
        """Take over what expansions ``first``, ``first`` + 1, … say of nodes here.

        ``tokens`` and ``log_probs`` [R, W, K] are the draft's children. ``judged`` [R, T] are the
        log chances of the nodes that were `asked` for, NaN where the draft has no judgement. The
        result is ``log_probs`` with ``-inf`` for children that are nodes here.
        """
        asked = self.asked(first, tokens.shape[1])
        if judged is not None:
            told = (asked >= 0) & ~judged.isnan()
            self._edges = torch.where(told, judged.to(self._edges.dtype), self._edges)
            self.values = self._path_values()
        new = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        same = (asked[:, None] == new)[:, :, None] & (
            tokens[..., None] == self.tokens[:, None, None]
        )
        return log_probs.masked_fill(same.any(dim=3), NO_VALUE)

    def expand(self, first: int, nodes: torch.Tensor, valid: torch.Tensor) -> None:
        """Make nodes ``nodes`` int64 [R, W] expansions ``first``, ``first`` + 1, ….

        Candidates that are not ``valid`` bool [R, W], or not of the trie, are left alone.
        """
        here = torch.where(valid & (nodes < self.size), nodes, self.size)
        new = torch.arange(first, first + nodes.shape[1], device=nodes.device)
        expansions = torch.nn.functional.pad(self._expansions, (0, 1))
        self._expansions = expansions.scatter(1, here, new.expand_as(here))[:, : self.size]

    def bits(self, nodes: torch.Tensor, own_bits: torch.Tensor) -> torch.Tensor:
        """Return the scratch columns of ancestors-or-self of ``nodes`` int64 [R, W] as bits.

        ``own_bits`` int32 [columns, words] is the bit of each column; column c is expansion
        c + 1's. The result is int32 [R, W, words].
        """
        own = own_bits[(self._expansions - 1).clamp(min=0)]
        own = own.masked_fill((self._expansions < 1)[:, :, None], 0)
        rows = nodes[:, :, None].expand(-1, -1, self.size)
        seen = self._ancestors.gather(1, rows)
        # Ancestors have different columns, so that the sum of their bits is their union.
        return torch.where(seen[..., None], own[:, None], 0).sum(dim=2).to(torch.int32)

    @property
    def expansions_above(self) -> torch.Tensor:
        """The expansions of the nodes' parents, 0 for the root, -1 for none so far."""
        return torch.where(self.above < 0, 0, self._expansions.gather(1, self._index))

    def _path_values(self) -> torch.Tensor:
        values = self._edges
        for _ in range(min(self._levels, self.size) - 1):
            values = torch.where(self.above < 0, 0.0, values.gather(1, self._index)) + self._edges
        return values
