"""Tries of random shapes, for tests of growth."""

from __future__ import annotations

import torch

from dyntree_kernels.tries import Trie

FAVOURED = 12
"""Tokens of the tries. If a draft favours them as well, it often proposes a trie's nodes."""


def random_trie(
    generator: torch.Generator,
    requests: int,
    size: int,
    *,
    real: float = 0.9,
    vocab: int = FAVOURED,
) -> Trie:
    """Return tries of ``vocab`` tokens.

    ``real``: the chance that a node exists if its parent does.
    """

    def chance(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    tokens = (chance(requests, size) * vocab).long()
    # Half of the nodes go on from the last one.
    index = torch.arange(size)
    above = torch.where(chance(requests, size) < 0.5, index, chance(requests, size) * (index + 1))
    above = above.long() - 1
    exists = chance(requests, size) < real
    # Of equal siblings one is real.
    twins = (tokens[:, :, None] == tokens[:, None]) & (above[:, :, None] == above[:, None])
    exists &= ~(twins & exists[:, None]).tril(-1).any(dim=2)
    for node in range(size):
        parent = above[:, node]
        exists[:, node] &= (parent < 0) | exists[torch.arange(requests), parent.clamp(min=0)]
    return Trie(tokens, above, 3 * torch.randn(requests, size, generator=generator), exists)
