"""Plain rows as chains, so that one kernel computes all rows of a batch."""

from __future__ import annotations

import torch

from dyntree_kernels.ancestors import pack_bits
from dyntree_plugin.engine.attention.metadata import TreeMask

CHAIN = 32
"""Most rows of a chain: those of one word of ancestor bits."""

_SEEN = pack_bits(torch.ones(CHAIN, CHAIN, dtype=torch.bool).tril())[:, 0]


def with_chains(
    mask: TreeMask, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the plain rows of R requests as chains of at most `CHAIN` rows, and trees as they are.

    The rows of a long prompt are several chains, each with the ones before as context.

    Args:
        mask: of a batch of T rows.
        block_table: int32 [R, blocks].
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].

    Returns:
        Block table, context lengths, first rows and ancestor bits of these, as `TreeAttention`
        takes them.
    """
    lengths = torch.diff(query_start_loc)
    is_tree = mask.ctx_lens >= 0
    parts = torch.where(is_tree, 1, (lengths + CHAIN - 1) // CHAIN)
    request = torch.repeat_interleave(parts)
    before = torch.cumsum(parts, 0) - parts
    offset = CHAIN * (torch.arange(len(request)) - before[request])
    context = torch.where(is_tree, mask.ctx_lens, seq_lens - lengths)
    starts = torch.cat([query_start_loc[request] + offset, query_start_loc[-1:]])
    rows = mask.ancestor_bits.shape[0]
    of_row = torch.repeat_interleave(lengths.long())
    place = (torch.arange(rows) - query_start_loc[of_row]) % CHAIN
    chain = torch.zeros(rows, mask.ancestor_bits.shape[1], dtype=torch.int32)
    chain[:, 0] = _SEEN[place]
    bits = torch.where(is_tree[of_row][:, None], mask.ancestor_bits, chain)
    return block_table[request], context[request] + offset, starts, bits
