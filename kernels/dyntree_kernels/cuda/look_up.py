"""Find what followed earlier places that look like the end of a text, in two launches.

The first searches blocks of every text, the second makes a trie of the best places of all blocks.
The shapes depend on those of the arguments alone, so a CUDA graph can hold both.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.tries import (
    LONGEST_MATCH,
    MATCHES,
    MOST_ON_CUDA,
    WINDOW,
    Trie,
    check_look_up,
)

MOST_DEPTH = 64
"""Limit of ``max_depth``: one program holds the continuations of all places in its registers."""

_BLOCK = 1024  # places that one program looks at
_MOST_TOKENS = 2**25
_STEP = tl.constexpr(_MOST_TOKENS)  # from a match to the next longer one in the keys of places


@triton.jit
def _first(keys, count, NONE: tl.constexpr, RANKS: tl.constexpr):
    """Return the largest `count` of distinct keys in descending order, then NONE."""
    rank = tl.arange(0, RANKS)
    best = tl.full([RANKS], NONE, keys.dtype)
    for k in range(count):
        top = tl.max(keys, 0)
        best = tl.where(rank == k, top, best)
        keys = tl.where(keys == top, NONE, keys)
    return best


@triton.jit
def _search(
    KEYS, TEXTS, LENGTHS, SLOTS, window, blocks, s_texts,
    LONGEST: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the keys of the best places in a block; block 0 is the text's last. No place is 0.

    Keys have the order of places: the longest match first, and of equals the latest place.
    """
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(SLOTS + request)
    last = tl.load(LENGTHS + slot, mask=slot >= 0, other=0) - 1
    text = TEXTS + slot * s_texts
    # A match ends before its place, and goes on to the left.
    end = last - 1 - block * BLOCK - tl.arange(0, BLOCK)
    agrees = end >= tl.maximum(last - window, 0)
    match = tl.zeros([BLOCK], tl.int32)
    length = 0
    while (length < LONGEST) & (tl.max(agrees.to(tl.int32), 0) > 0):
        inside = agrees & (end >= length)
        token = tl.load(text + end - length, mask=inside, other=0)
        agrees = inside & (token == tl.load(text + last - length))
        match += agrees.to(tl.int32)
        length += 1
    keys = tl.where(match > 0, match * _STEP + end + 1, 0)
    matches = tl.sum((match > 0).to(tl.int32), 0)
    best = _first(keys, tl.minimum(matches, KEPT), 0, KEPT)
    tl.store(KEYS + (request * blocks + block) * KEPT + tl.arange(0, KEPT), best)


@triton.jit
def _judge(agreed, match, depth):
    """Return the evidence of all nodes, and what their paths are worth, negated [places, depths].

    agreed [places, places]: how many tokens of two continuations agree; -1 if one is missing.
    depth: that of the nodes' parents. Weights have the same denominator, so integers are added:
    their sums are exact, and paths that differ only in their tokens are worth exactly the same.
    """
    agreed, depths = agreed[:, :, None], depth[None, None, :]
    agreeing = match[None, :, None] + depths
    above, own = tl.where(agreed >= depths, agreeing, 0), tl.where(agreed > depths, agreeing, 0)
    total, chosen = tl.sum(above * above, 1), tl.sum(own * own, 1)
    longest = tl.max(above, 1)
    one = longest * longest
    # Where there is no node, any number does.
    odds = (2 * chosen + one).to(tl.float64) / tl.maximum(2 * (total - chosen) + one, 1)
    length = tl.maximum(tl.max(own, 1), 1).to(tl.float64)
    evidence = 1.5 * (tl.log(tl.where(odds > 0, odds, 1.0)) + 0.3 * (tl.log2(length) - 2)) - 0.2
    return evidence, tl.cumsum(tl.log(1 + tl.exp(-evidence)), 1)


@triton.jit
def _grow(
    TOKENS, ABOVE, EVIDENCE, EXISTS, KEYS, TEXTS, LENGTHS, SLOTS,
    known, nodes, max_depth, s_texts,
    PLACES: tl.constexpr, DEPTHS: tl.constexpr, NODES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Make the trie of one request. A node is known by its depth and the best of its places."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + request)
    text = TEXTS + slot * s_texts
    entry, rank, depth = tl.arange(0, ENTRIES), tl.arange(0, PLACES), tl.arange(0, DEPTHS)
    keys = tl.load(KEYS + request * known + entry, mask=entry < known, other=0)
    best = _first(keys, PLACES, 0, PLACES)
    found, match, place = best > 0, best // _STEP, best % _STEP

    # Continuations, and how far they agree.
    left = tl.load(LENGTHS + slot, mask=slot >= 0, other=0) - place
    steps = depth[None, :] % tl.maximum(left, 1)[:, None]
    inside = found[:, None] & (depth < max_depth)[None, :]
    tokens = tl.load(text + place[:, None] + steps, mask=inside, other=-1)
    differ = tokens[:, None, :] != tokens[None, :, :]
    agreed = tl.min(tl.where(differ, depth[None, None, :], DEPTHS), 2)
    agreed = tl.where(found[:, None] & found[None, :], agreed, -1)
    evidence, worth = _judge(agreed, match, depth)

    # A node belongs to the best of its places, and so does its parent.
    better = tl.where(agreed[:, :, None] >= depth[None, None, :], rank[None, :, None], PLACES)
    parents_best = tl.min(better, 1)
    better = tl.where(agreed[:, :, None] > depth[None, None, :], rank[None, :, None], PLACES)
    owned = inside & (tl.min(better, 1) == rank[:, None])
    # Positive floats have the order of their bits. The last bits order what is worth the same.
    MASK: tl.constexpr = PLACES * DEPTHS - 1
    code = depth[None, :] * PLACES + rank[:, None]
    order = -((worth.to(tl.int64, bitcast=True) & ~MASK) | code)
    NONE: tl.constexpr = -(2**63)
    order = tl.reshape(tl.where(owned, order, NONE), [PLACES * DEPTHS])
    chosen = _first(order, nodes, NONE, NODES)

    node = tl.arange(0, NODES)
    exists = chosen > NONE
    code = (-chosen & MASK).to(tl.int32)
    at = (code % PLACES) * DEPTHS + code // PLACES
    token = tl.gather(tl.reshape(tokens, [PLACES * DEPTHS]), at, 0)
    logit = tl.gather(tl.reshape(evidence.to(tl.float32), [PLACES * DEPTHS]), at, 0)
    parents_best = tl.gather(tl.reshape(parents_best, [PLACES * DEPTHS]), at, 0)
    parent = code // PLACES * PLACES - PLACES + parents_best
    is_parent = (parent[:, None] == code[None, :]) & exists[None, :] & (parent >= 0)[:, None]
    above = tl.max(tl.where(is_parent, node[None, :], -1), 1)

    out, inside = request * nodes + node, node < nodes
    tl.store(TOKENS + out, tl.where(exists, token, 0).to(tl.int64), mask=inside)
    tl.store(ABOVE + out, tl.where(exists, above, -1).to(tl.int64), mask=inside)
    tl.store(EVIDENCE + out, tl.where(exists, logit, 0.0), mask=inside)
    tl.store(EXISTS + out, exists, mask=inside)


def look_up(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    trie: Trie,
    *,
    max_depth: int,
    window: int = WINDOW,
) -> None:
    """Fill ``trie`` with what followed earlier places that end as the texts do. See `LookUp`.

    Raises:
        ValueError: as in `LookUp`, and for more depth, nodes or tokens than the kernels can hold.
    """
    check_look_up(tokens, lengths, slots, trie)
    (requests, nodes), longest = trie.tokens.shape, tokens.shape[1]
    for name, value, most in (
        ("max_depth", max_depth, MOST_DEPTH),
        ("nodes", nodes, MOST_ON_CUDA),
        ("tokens", longest, _MOST_TOKENS),
    ):
        if value > most:
            raise ValueError(f"{name}={value} is not served; allowed: at most {most}")
    if not requests:
        return
    blocks = triton.cdiv(max(1, min(window, longest)), _BLOCK)
    keys = torch.empty(requests, blocks, MATCHES, dtype=torch.int32, device=tokens.device)
    texts = (keys, tokens, lengths, slots)
    _search[(requests, blocks)](
        *texts, window, blocks, longest, LONGEST=LONGEST_MATCH, KEPT=MATCHES, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    known = blocks * MATCHES
    _grow[(requests,)](
        *trie, *texts, known, nodes, max_depth, longest, PLACES=MATCHES,
        DEPTHS=triton.next_power_of_2(max_depth), NODES=triton.next_power_of_2(nodes),
        ENTRIES=triton.next_power_of_2(known), num_warps=4,
    )  # fmt: skip
