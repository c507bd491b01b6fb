"""Ancestor bitmasks: the columns of a tree's KV cache that each query row may see."""

from __future__ import annotations

import torch


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., columns] into int32 [..., ceil(columns / 32)], bit c % 32 of word c // 32."""
    columns = mask.shape[-1]
    words = -(-columns // 32)
    padded = torch.nn.functional.pad(mask, (0, words * 32 - columns))
    shifts = torch.arange(32, device=mask.device)
    return (padded.view(*mask.shape[:-1], words, 32).long() << shifts).sum(-1).to(torch.int32)


def unpack_bits(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack int32 [..., words] into bool [..., columns], the inverse of `pack_bits`."""
    shifts = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :columns].bool()


def ancestor_bits(parents: torch.Tensor) -> torch.Tensor:
    """Mark every node and its ancestors, for a batch of trees.

    Args:
        parents: int [R, N], index of each node's parent within its row. A negative value marks
            a root or padding, which sees only itself. The nodes may be in any order.

    Returns:
        int32 [R, N, ceil(N / 32)]: bit c of row i is set if node c is node i or one of its
        ancestors. This takes ceil(log2(N)) gathers and no host synchronisation.
    """
    rows, nodes = parents.shape
    index = torch.arange(nodes, device=parents.device)
    words = torch.arange(-(-nodes // 32), device=parents.device)
    own = torch.ones_like(index, dtype=torch.int32) << (index % 32).int()
    bits = torch.where(index[:, None] // 32 == words, own[:, None], 0).expand(rows, -1, -1)
    jump = torch.where(parents < 0, index, parents.long())  # a root points at itself
    for _ in range((nodes - 1).bit_length()):
        # After k rounds a row holds its 2**k nearest ancestors-or-self, and jump is 2**k levels up.
        bits = bits | bits.gather(1, jump[:, :, None].expand_as(bits))
        jump = jump.gather(1, jump)
    return bits.contiguous()
