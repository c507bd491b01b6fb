"""Verification of drawn chains as blocks: what its kernels share.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444),
algorithm 2. The tokens of a chain are accepted together rather than one by one. On a chain it is
traversal verification (`tree/traversal.py` of the plugin), by which CPUs verify chains, too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dyntree_kernels.contracts import BatchRows


class DrawnChains(NamedTuple):
    """How the chains of R requests of a batch were drawn, and the seeds of the noise that decides.

    ``laws`` float32 [slots, D, V]: the draft's distributions, from which the tokens of each slot's
    chain were drawn. ``counts`` int64 [slots]: tokens of the chains. ``accepting`` int64 [R]: seeds
    of the noise that accepts a chain. ``emitting`` int64 [R]: seeds of the noise that draws the
    token after it. The position of all noise is the root's.
    """

    laws: torch.Tensor
    counts: torch.Tensor
    accepting: torch.Tensor
    emitting: torch.Tensor


class DecideBlocks(Protocol):
    """Decides how much of each chain is accepted, and draws the token after it."""

    def __call__(self, rows: BatchRows, logits: torch.Tensor, chains: DrawnChains) -> None:
        """Write the outcome into ``rows``, so that a `Walk` over these comes to it.

        Requests at a temperature above 0 have chains. The sixth column of ``rows.requests`` has the
        bits of the temperature, a float32. ``rows.sampled`` gets the accepted tokens of each chain
        and the one after them, each at the row that it is emitted from. ``rows.forbidden``, which
        must not be None, gets the node after the last accepted one. A chain whose first node is
        forbidden is not verified. Nothing else changes.

        ``logits`` [L, V], any float: the target's, after temperature, top-k and penalties.
        """
        ...
