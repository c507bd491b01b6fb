"""Seeds of noise that is independent of the target sampler's own."""

from __future__ import annotations

import torch

DRAFT, ACCEPT, BONUS = 1, 2, 3
"""What noise is for: drawing children, accepting them, and drawing what follows the last."""

# Odd 64-bit constants (of Knuth's MMIX and of SplitMix64), so that no two streams share a seed for
# long; the noise's own hash does the mixing.
_OF_SEED = 6364136223846793005
_OF_PURPOSE = -7046029254386353131
_OF_INDEX = -4658895280553007687


def stream(seeds: torch.Tensor, purpose: int, index: torch.Tensor | int = 0) -> torch.Tensor:
    """Seeds int64 of a stream of their own for each of ``seeds`` int64, purpose and index."""
    known = purpose * _OF_PURPOSE + (index * _OF_INDEX if isinstance(index, int) else 0)
    own = seeds * _OF_SEED + ((known + 2**63) % 2**64 - 2**63)
    return own if isinstance(index, int) else own + index * _OF_INDEX


def uniform(gumbel: torch.Tensor) -> torch.Tensor:
    """Gumbel noise as uniform numbers in [0, 1)."""
    below_one = 1 - torch.finfo(gumbel.dtype).eps / 2
    return torch.exp(-torch.exp(-gumbel)).clamp(max=below_one)
