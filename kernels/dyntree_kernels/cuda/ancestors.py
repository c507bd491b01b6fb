"""Ancestor bitmasks in one launch; `dyntree_kernels.ancestors` is the same in plain torch."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 32


@triton.jit
def _climb(PARENTS, BITS, nodes, words, s_parents, NODES: tl.constexpr, WORDS: tl.constexpr):
    request = tl.program_id(1).to(tl.int64)
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    word = tl.arange(0, WORDS)
    bits = tl.zeros([NODES, WORDS], tl.int32)
    at = tl.where(node < nodes, node, -1)
    while tl.max(at, 0) >= 0:
        own = tl.full([NODES], 1, tl.int32) << (at & 31)
        here = (word[None, :] == (at // 32)[:, None]) & (at >= 0)[:, None]
        bits |= tl.where(here, own[:, None], 0)
        above = tl.load(PARENTS + request * s_parents + at, mask=at >= 0, other=-1)
        at = above.to(tl.int32)
    out = BITS + (request * nodes + node)[:, None] * words + word[None, :]
    tl.store(out, bits, mask=(node < nodes)[:, None] & (word < words)[None, :])


def ancestor_bits(parents: torch.Tensor) -> torch.Tensor:
    """Ancestors-or-self of every node of a batch of trees: see `dyntree_kernels.ancestors`.

    Every node climbs to its root, so the time grows with the depth of the trees.
    """
    requests, nodes = parents.shape
    words = triton.cdiv(nodes, 32)
    parents = parents if parents.stride(1) == 1 else parents.contiguous()
    bits = torch.empty(requests, nodes, words, dtype=torch.int32, device=parents.device)
    if bits.numel():
        block = min(_BLOCK, triton.next_power_of_2(nodes))
        _climb[(triton.cdiv(nodes, block), requests)](
            parents, bits, nodes, words, parents.stride(0), NODES=block,
            WORDS=triton.next_power_of_2(words), num_warps=max(1, min(8, words // 4)),
        )  # fmt: skip
    return bits
