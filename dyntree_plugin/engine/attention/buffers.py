"""Masks at fixed addresses, for captured graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from dyntree_kernels.ancestors import pack_bits


class MaskBuffers:
    """Context lengths and ancestor bits of a batch, at addresses that never change.

    A request without a tree is treated as a chain if its rows fit into a tree's columns. So one
    kernel serves every batch in which no request has more rows than that, and none rows of an image
    that see later ones.
    """

    def __init__(
        self, max_requests: int, max_rows: int, columns: int, device: torch.device
    ) -> None:
        """``columns``: number of rows of the largest tree, its root included."""
        self.columns = columns
        # Row i of a chain sees rows 0 to i.
        chain = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()
        self._chain = pack_bits(chain)
        words = self._chain.shape[1]
        self._ctx_lens = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        self._bits = torch.zeros(max_rows, words, dtype=torch.int32, device=device)
        self._filled = 0  # Only so many leading context lengths may differ from -1.

    @property
    def rows(self) -> int:
        """The most rows of a batch."""
        return self._bits.shape[0]

    def room(self, requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where `fill` puts the masks of such a batch, which is not copied from there."""
        return self._ctx_lens[:requests], self._bits[:rows]

    def fill(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        num_rows: int,
        ctx_lens: torch.Tensor | None = None,
        ancestor_bits: torch.Tensor | None = None,
        *,
        all_trees: bool = False,
        chains: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the masks of a batch of R requests and T = ``num_rows`` rows, padding included.

        Args:
            query_start_loc: int32 [R + 1], as in vLLM's metadata.
            seq_lens: int32 [R], as in vLLM's metadata.
            num_rows: T.
            ctx_lens: as in `TreeMask`, without padding.
            ancestor_bits: as in `TreeMask`, without padding.
            all_trees: whether every request but padding has a tree.
            chains: whether requests without a tree are chains where their rows fit.

        Returns:
            Views of the buffers: context lengths int32 [R], -1 for requests whose rows do not fit
            or are no chain, and bits int32 [T, words].
        """
        requests = seq_lens.shape[0]
        out_lens, out_bits = self.room(requests, num_rows)
        real = 0 if ctx_lens is None else ctx_lens.shape[0]
        if not all_trees and chains:
            self._fill_chains(query_start_loc, seq_lens, out_lens, out_bits)
        elif not all_trees:
            out_lens.fill_(-1)
        elif real < self._filled:
            self._ctx_lens[real : self._filled].fill_(-1)
        self._filled = real if all_trees else max(requests, self._filled)
        if ctx_lens is None or ancestor_bits is None:
            return out_lens, out_bits
        rows = ancestor_bits.shape[0]
        if all_trees:
            if ancestor_bits.data_ptr() != out_bits.data_ptr():
                out_lens[:real].copy_(ctx_lens)
                out_bits[:rows].copy_(ancestor_bits)
            return out_lens, out_bits
        is_tree = ctx_lens >= 0
        of_tree = is_tree[_request_of_row(query_start_loc[: real + 1], rows)]
        out_lens[:real].copy_(torch.where(is_tree, ctx_lens, out_lens[:real]))
        out_bits[:rows].copy_(torch.where(of_tree[:, None], ancestor_bits, out_bits[:rows]))
        return out_lens, out_bits

    def _fill_chains(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        out_lens: torch.Tensor,
        out_bits: torch.Tensor,
    ) -> None:
        lengths = query_start_loc[1:] - query_start_loc[:-1]
        fits = (lengths > 0) & (lengths <= self.columns)
        # Dummy batches may have fewer positions than rows.
        out_lens.copy_(torch.where(fits, (seq_lens - lengths).clamp(min=0), -1))
        request = _request_of_row(query_start_loc, out_bits.shape[0])
        row = torch.arange(out_bits.shape[0], device=out_bits.device)
        place = (row - query_start_loc[request]).clamp(max=self.columns - 1)
        out_bits.copy_(self._chain[place])


class Masked(Protocol):
    """A builder of metadata that reads masks from buffers."""

    masks: MaskBuffers


def shared(builders: Iterable[Masked]) -> MaskBuffers | None:
    """Let the builders of an engine share the largest of their buffers, and return it.

    The target's all get the masks of the same batch; those of a draft fill in chains later, on the
    same stream. Without a builder there are none.
    """
    every = list(builders)
    largest = max((each.masks for each in every), key=lambda masks: masks.rows, default=None)
    for each in every:
        if largest is not None:
            each.masks = largest
    return largest


def _request_of_row(query_start_loc: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the request of every row. Padding rows map to the last request."""
    row = torch.arange(num_rows, device=query_start_loc.device)
    request = torch.searchsorted(query_start_loc[1:], row, right=True)
    return request.clamp(max=query_start_loc.shape[0] - 2)
