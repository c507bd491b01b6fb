"""Seeds of noise that is independent of the target sampler's noise."""

from __future__ import annotations

import torch

DRAFT, ACCEPT, BONUS = 1, 2, 3
"""The purposes of noise: drawing children, accepting them, and drawing the bonus token."""

# Odd 64-bit constants (of Knuth's MMIX and of SplitMix64) keep streams from sharing seeds for long.
# The hash of the noise mixes them.
_OF_SEED = 6364136223846793005
_OF_PURPOSE = -7046029254386353131
_OF_INDEX = -4658895280553007687


def stream(seeds: torch.Tensor, purpose: int, index: torch.Tensor | int = 0) -> torch.Tensor:
    """Return int64 seeds of a separate stream for each of ``seeds`` int64, purpose and index."""
    known = purpose * _OF_PURPOSE + (index * _OF_INDEX if isinstance(index, int) else 0)
    own = seeds * _OF_SEED + ((known + 2**63) % 2**64 - 2**63)
    return own if isinstance(index, int) else own + index * _OF_INDEX


def uniform(gumbel: torch.Tensor) -> torch.Tensor:
    """Turn Gumbel noise into uniform numbers in [0, 1)."""
    below_one = 1 - torch.finfo(gumbel.dtype).eps / 2
    return torch.exp(-torch.exp(-gumbel)).clamp(max=below_one)
