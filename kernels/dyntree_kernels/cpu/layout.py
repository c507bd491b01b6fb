"""Element layouts of vLLM's CPU attention cache.

A layer's cache is [blocks, Hkv, N, 2 * D] with block size N and head size D. Per block and head
the first N * D elements hold the keys and the rest the values, each packed for an ISA:

====================  ==========================  ==========================
isa                   keys                        values
====================  ==========================  ==========================
vec, vec16            [D, N]                      [N, D]
amx (not for float32) [N / 16, D / 2, 16, 2]      [D / 16, N / 2, 16, 2]
====================  ==========================  ==========================

In both layouts, an element's offset within its block is the sum of an offset by position and an
offset by dimension. The kernels address elements by these two offsets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

ISAS = ("vec", "vec16", "amx")


@dataclass(frozen=True)
class Offsets:
    """Offsets of the elements of one block and head from its first key or value, in elements."""

    key_position: torch.Tensor  # int64 [N]
    key_lane: torch.Tensor  # int64 [D]
    value_position: torch.Tensor  # int64 [N]
    value_lane: torch.Tensor  # int64 [D]


def is_paired(isa: str) -> bool:
    """Return whether `isa` interleaves two elements for 16-bit dot products (amx).

    Raises:
        ValueError: for a layout that the kernels do not support (neon, vxe, vsx, rvv).
    """
    if isa not in ISAS:
        raise ValueError(
            f"CPU attention layout isa={isa!r} is not supported; allowed: {', '.join(ISAS)}"
        )
    return isa == "amx"


@functools.cache
def offsets(isa: str, block_size: int, head_size: int) -> Offsets:
    """Return the offsets of one block and head; position t, dimension i: position[t] + lane[i]."""
    t, i = torch.arange(block_size), torch.arange(head_size)
    if is_paired(isa):
        return Offsets(
            key_position=t // 16 * 16 * head_size + t % 16 * 2,
            key_lane=i // 2 * 32 + i % 2,
            value_position=t // 2 * 32 + t % 2,
            value_lane=i // 16 * 16 * block_size + i % 16 * 2,
        )
    return Offsets(t, i * block_size, t * head_size, i)


def unpack(
    key_cache: torch.Tensor, value_cache: torch.Tensor, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token-major copies [blocks * N, Hkv, D] of the keys and values, indexed by slot."""
    blocks, heads, block_size, head_size = key_cache.shape
    at = offsets(isa, block_size, head_size)

    def gather(cache: torch.Tensor, position: torch.Tensor, lane: torch.Tensor) -> torch.Tensor:
        block = cache.as_strided((blocks, heads, block_size * head_size), (*cache.stride()[:2], 1))
        return block[..., position[:, None] + lane].transpose(1, 2).flatten(0, 1)

    return (
        gather(key_cache, at.key_position, at.key_lane),
        gather(value_cache, at.value_position, at.value_lane),
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of the memory from a tensor's first to its last element."""
    span = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.as_strided((span,), (1,))
