"""The paths down to the nodes that a step expands, as tokens."""

from __future__ import annotations

import torch

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.paths import Paths


class DraftPaths:
    """The tokens of the nodes that a step expands, by request and scratch column.

    They lie at a fixed address. A row's ancestor bits are the columns of its path, which ascend
    from the root down, since no node is expanded before its parent.
    """

    def __init__(self, requests: int, columns: int, depth: int, device: torch.device) -> None:
        """``requests``: the most of a step. ``columns``: nodes of a request that a step expands.
        ``depth``: of the deepest node; paths have room for as many tokens."""
        self._depth = depth
        self._tokens = torch.zeros(requests, columns, dtype=torch.int32, device=device)

    def of_roots(self, rows: int) -> Paths:
        """Return the paths of so many rows of roots, which are empty."""
        return Paths(self._tokens.new_zeros(rows, self._depth), self._tokens.new_zeros(rows))

    def add(
        self, requests: int, first: int, ids: torch.Tensor, ancestor_bits: torch.Tensor
    ) -> Paths:
        """Note the tokens of a forward's rows, and return the rows' paths.

        ``requests``: R. ``first``: the scratch column of each request's first row. ``ids`` int32
        [R * W]: the rows' tokens. ``ancestor_bits`` int32 [R * W, words] over the scratch columns.
        """
        width, columns = len(ids) // max(1, requests), self._tokens.shape[1]
        tokens = self._tokens[:requests]
        tokens[:, first : first + width].copy_(ids.view(requests, width))
        seen = unpack_bits(ancestor_bits, columns)
        # Columns off the path go after its last place.
        places = torch.where(seen, seen.cumsum(dim=1) - 1, self._depth).clamp(max=self._depth)
        found = tokens.new_zeros(len(ids), self._depth + 1)
        found.scatter_(1, places, tokens.repeat_interleave(width, dim=0))
        return Paths(found[:, : self._depth].contiguous(), seen.sum(dim=1, dtype=torch.int32))
