"""Write the trees that growth has chosen to the store of the engine."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expansion_of(candidate, K: tl.constexpr, GRAFTS: tl.constexpr):
    """Return the expansions that candidates are children of; 0 for the nodes of a trie."""
    expansion = (candidate - GRAFTS) // K
    if GRAFTS:
        expansion = tl.where(candidate >= GRAFTS, expansion, 0)
    return expansion


@triton.jit
def _describe(
    OUT_TOKENS, DEPTHS, STORED_VALUES, STORED_FEATURES, STORED_KINDS, TOKENS, VALUES, FEATURES,
    KINDS, LEVELS, GRAFT_DEPTHS, token_out, out, candidates, own, trie, candidate, expansion,
    exists, inside, FEATURED: tl.constexpr, GRAFTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Write what is known of the rows' candidates, and return how many forwards are known to be
    above them: a forward for each level, but none above a node of a trie, and with tries and no
    SHIFT none yet.

    `token_out`, `out`: where the rows' tokens, and all else of them, are written. `candidates`,
    `own`, `trie`: where the candidates, expansions and trie of the request begin.
    """
    at = candidates + candidate
    level = tl.load(LEVELS + own + expansion, mask=inside, other=0)
    depth, forwards = level + 1, level
    if GRAFTS:
        grafted = exists & (candidate < GRAFTS)
        of_trie = tl.load(GRAFT_DEPTHS + trie + candidate, mask=grafted, other=1)
        depth = tl.where(grafted, of_trie.to(tl.int64), depth)
        forwards = tl.where(grafted, 0, level) if SHIFT else tl.zeros_like(level)
        kind = tl.load(KINDS + at, mask=inside, other=0)
        tl.store(STORED_KINDS + out, kind, mask=inside)
    tl.store(OUT_TOKENS + token_out, tl.load(TOKENS + at, mask=exists, other=0), mask=inside)
    tl.store(DEPTHS + out, depth, mask=inside)
    value = tl.load(VALUES + at, mask=exists, other=float("-inf"))
    tl.store(STORED_VALUES + out, value, mask=inside)
    if FEATURED:
        for f in range(2):
            feature = tl.load(FEATURES + at * 2 + f, mask=inside, other=0)
            tl.store(STORED_FEATURES + out * 2 + f, feature, mask=inside)
    return forwards


@triton.jit
def store(
    OUT_TOKENS, PARENTS, DEPTHS, STORED_VALUES, ANCESTORS, STORED_FEATURES, STORED_KINDS, FORWARDS,
    STORED_AT, VALUES, TOKENS, FEATURES, KINDS, NODES, LEVELS, BEST, BECAME, ABOVE, GRAFT_DEPTHS,
    expansions, budget, words, deepest,
    K: tl.constexpr, FEATURED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    GRAFTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Write some rows of a request's tree: row 0 is the root, row 1 + n is node n."""
    request = tl.program_id(0).to(tl.int64)
    own, trie = request * expansions, request * GRAFTS
    candidates = trie + own * K
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    node, inside = row - 1, (row > 0) & (row <= budget)
    best = tl.load(BEST + request * budget + node, mask=inside, other=-1).to(tl.int32)
    exists = best >= 0
    candidate = tl.where(exists, best, 0)
    expansion = expansion_of(candidate, K, GRAFTS)
    slot = tl.load(STORED_AT + request)
    out = slot * budget + node

    forwards = _describe(
        OUT_TOKENS, DEPTHS, STORED_VALUES, STORED_FEATURES, STORED_KINDS, TOKENS, VALUES, FEATURES,
        KINDS, LEVELS, GRAFT_DEPTHS, request * budget + node, out, candidates, own, trie,
        candidate, expansion, exists, inside, FEATURED, GRAFTS, SHIFT,
    )  # fmt: skip

    # Climb from each node to the root; parents that were expanded are in the tree.
    word = tl.arange(0, WORDS)
    bits = tl.where(word[None, :] == (row >> 5)[:, None], 1 << (row & 31)[:, None], 0)
    bits |= tl.where(word[None, :] == 0, 1, 0)
    parent = tl.full([ROWS], -1, tl.int64)
    for _ in range(deepest):
        climbing = exists & (expansion > 0)
        above = tl.load(NODES + own + expansion, mask=climbing, other=0)
        if GRAFTS:
            if not SHIFT:  # one forward may expand a trie's node and its child
                forwards += climbing.to(tl.int64)
            grafted = exists & (candidate < GRAFTS)
            of_trie = tl.load(ABOVE + trie + candidate, mask=grafted, other=-1)
            above = tl.where(grafted, of_trie.to(tl.int64), above)
            climbing = (climbing | grafted) & (above >= 0)
            candidate = tl.where(climbing, above.to(tl.int32), candidate)
        became = tl.load(BECAME + candidates + above, mask=climbing, other=-1)
        parent = tl.where(climbing & (parent < 0), became, parent)
        bit = (became + 1).to(tl.int32)
        here = climbing[:, None] & (word[None, :] == (bit >> 5)[:, None])
        bits |= tl.where(here, 1 << (bit & 31)[:, None], 0)
        expansion = tl.where(climbing, expansion_of(above.to(tl.int32), K, GRAFTS), 0)
    tl.store(PARENTS + out, parent, mask=inside)
    tl.store(FORWARDS + out, forwards, mask=inside)
    to = ANCESTORS + ((slot * (budget + 1) + row) * words)[:, None] + word[None, :]
    tl.store(to, bits, mask=(row <= budget)[:, None] & (word < words)[None, :])
