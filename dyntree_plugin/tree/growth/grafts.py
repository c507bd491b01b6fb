"""The nodes of a trie among the candidates of one step, and what the draft makes of them."""

from __future__ import annotations

import torch

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_plugin.tree.source import DRAFT, Trie
from dyntree_plugin.tree.token_tree import NO_VALUE


class Grafts:
    """T nodes of each of R requests, which are candidates 0 … T - 1 of the step.

    A node's value is its parent's plus the log chance of the edge between them. If the draft
    proposes a child that the trie has, the two are one node, and its edge has the larger of both
    chances. All tensors are [R, T].
    """

    def __init__(
        self, trie: Trie, kind: int, max_depth: int, dtype: torch.dtype, whole_paths: bool = True
    ) -> None:
        """Take over ``trie`` down to ``max_depth``; ``dtype`` is that of values.

        ``whole_paths`` says whether one forward may expand a node and its child.

        Raises:
            ValueError: if the trie's tensors have different shapes, or ``kind`` is not a bit of
                its own.
        """
        for name, part in trie._asdict().items():
            if part.dim() != 2 or part.shape != trie.tokens.shape:
                raise ValueError(
                    f"trie.{name} {tuple(part.shape)} must have the shape of trie.tokens "
                    f"{tuple(trie.tokens.shape)}, [requests, nodes]"
                )
        if kind <= DRAFT or kind & (kind - 1):
            raise ValueError(f"kind={kind} must be a power of two above the draft's, {DRAFT}")
        self.size = trie.tokens.shape[1]
        self.tokens = trie.tokens.long()
        self.above = torch.where(trie.exists, trie.above.long(), -1)
        self._index = self.above.clamp(min=0)
        self._ancestors = unpack_bits(ancestor_bits(self.above), self.size)
        self.depths = self._ancestors.sum(dim=2)
        chances = trie.log_chances.to(dtype).clamp(max=0.0).nan_to_num(NO_VALUE, neginf=NO_VALUE)
        real = trie.exists & (self.depths <= max_depth)
        self._edges = chances.masked_fill(~real, NO_VALUE)
        self._levels = max_depth
        self._kind = kind
        self._whole_paths = whole_paths
        # The expansion and the draft's own candidate of each node; -1 where there is none.
        self._expansions = torch.full_like(self.above, -1)
        self.proposals = torch.full_like(self.above, -1)
        self.values = self._path_values()

    @property
    def kinds(self) -> torch.Tensor:
        """The sources that proposed each node, as bits."""
        return torch.where(self.proposals >= 0, self._kind | DRAFT, self._kind)

    @property
    def open_values(self) -> torch.Tensor:
        """Values of the nodes that the next forward may expand, ``-inf`` for the others."""
        closed = self._expansions >= 0
        if not self._whole_paths:
            closed = closed | (self._expansions_above() < 0)
        return self.values.masked_fill(closed, NO_VALUE)

    def merge(self, first: int, tokens: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Recognise children of expansions ``first``, ``first`` + 1, … that are nodes here.

        ``tokens`` and ``log_probs`` [R, W, K] are the draft's children. The result is
        ``log_probs`` with ``-inf`` for children that are nodes here, whose edges and values follow
        the draft from then on.
        """
        width, children = tokens.shape[1:]
        new = torch.arange(first, first + width, device=tokens.device)
        same = (self._expansions_above()[:, None] == new[:, None])[:, :, None]
        same = same & (tokens[..., None] == self.tokens[:, None, None])
        same &= (log_probs > NO_VALUE)[..., None] & (self._edges > NO_VALUE)[:, None, None]

        proposed, which = same.flatten(1, 2).int().max(dim=1)
        chances = log_probs.flatten(1).gather(1, which).masked_fill(proposed == 0, NO_VALUE)
        self._edges = torch.maximum(self._edges, chances)
        self.proposals = torch.where(proposed > 0, first * children + which, self.proposals)
        self.values = self._path_values()
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

    def _expansions_above(self) -> torch.Tensor:
        """Return the expansions of the nodes' parents, 0 for the root, -1 for none so far."""
        return torch.where(self.above < 0, 0, self._expansions.gather(1, self._index))

    def _path_values(self) -> torch.Tensor:
        values = self._edges
        for _ in range(min(self._levels, self.size) - 1):
            values = torch.where(self.above < 0, 0.0, values.gather(1, self._index)) + self._edges
        return values
