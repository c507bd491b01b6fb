"""Find what followed earlier places that look like the end of a text, in one compiled call."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.simd import BITS, equal_bits, highest_bit
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.tries import LONGEST_MATCH, MATCHES, WINDOW, Trie, check_look_up

_TRIE, _TOKENS = 3000, 7  # operations of `use_torch_threads` per trie, and tokens per operation
_ONE = np.uint64(1)

# A node that is not in the trie yet, but its parent is. Open nodes have different places, so each
# is stored at the index of the best of them. `places`: bits of their indices, 0 if none is open.
_OPEN = np.dtype(
    [
        ("places", np.int64),
        ("token", np.int64),
        ("above", np.int64),
        ("depth", np.int64),
        ("evidence", np.float64),
        ("worth", np.float64),
    ]
)


@compiled
def _match(text, end):
    """Return the match of the place after `end`."""
    last = text.shape[0] - 1
    length = 0
    while length < LONGEST_MATCH and length <= end and text[end - length] == text[last - length]:
        length += 1
    return length


@compiled
def _promising(text, start, stop, least):
    """Return the bits of the at most BITS ends from `start` on that may have longer matches.

    A match longer than `least` contains the text's last token and the one `least` before it.
    """
    last = text.shape[0] - 1
    if stop - start == BITS:
        nearest = equal_bits(text, start, text[last])
        return nearest & equal_bits(text, start - least, text[last - least])
    bits = np.uint64(0)
    for end in range(start, stop):
        if text[end] == text[last] and text[end - least] == text[last - least]:
            bits |= _ONE << np.uint64(end - start)
    return bits


@compiled
def _find(text, window, places, matches):
    """Fill places and matches [MATCHES], best first, and return how many there are.

    The search goes from the latest place to the earliest, so a later find needs a longer match.
    """
    count, least = 0, 0
    stop = text.shape[0] - 1
    first = max(stop - window, 0)
    while stop > max(first, least) and least < LONGEST_MATCH:
        start = max(stop - BITS, first, least)
        bits = _promising(text, start, stop, least)
        stop = start
        while bits > 0:
            bit = highest_bit(bits)
            bits ^= _ONE << np.uint64(bit)
            match = _match(text, start + bit)
            if match <= least:
                continue
            at = min(count, MATCHES - 1)
            while at > 0 and matches[at - 1] < match:
                places[at], matches[at] = places[at - 1], matches[at - 1]
                at -= 1
            places[at], matches[at] = start + bit + 1, match
            count = min(count + 1, MATCHES)
            if count == MATCHES:
                least = matches[MATCHES - 1]
    return count


@compiled(error_model="numpy")
def _branch(text, places, matches, members, node, depth, worth, opened):
    """Open the children of a node at `depth`, whose places have their bits in `members`.

    All weights have the same denominator, and `weights` are the numerators. These are integers, so
    their sums are exact, and paths that differ only in their tokens are worth exactly the same.
    """
    weights, tokens = np.empty(MATCHES, np.int64), np.empty(MATCHES, np.int64)
    denominator, total = 0, 0
    for i in range(places.shape[0]):
        if members >> i & 1:
            weights[i] = (matches[i] + depth) ** 2
            tokens[i] = text[places[i] + depth % (text.shape[0] - places[i])]
            denominator = max(denominator, weights[i])
            total += weights[i]
    for best in range(places.shape[0]):
        if not members >> best & 1:
            continue
        same, agreeing = 0, 0
        for i in range(best, places.shape[0]):
            if members >> i & 1 and tokens[i] == tokens[best]:
                same |= 1 << i
                agreeing += weights[i]
        members ^= same
        odds = (2 * agreeing + denominator) / (2 * (total - agreeing) + denominator)
        corrected = math.log(odds) + 0.3 * (math.log2(matches[best] + depth) - 2)
        evidence = 1.5 * corrected - 0.2
        opened["places"][best], opened["token"][best] = same, tokens[best]
        opened["above"][best], opened["depth"][best] = node, depth + 1
        opened["evidence"][best] = evidence
        opened["worth"][best] = worth - math.log1p(math.exp(-evidence))


@compiled
def _best(opened):
    """Return the open node whose path is worth most, or -1 if none is open."""
    best = -1
    for i in range(MATCHES):
        if opened["places"][i] == 0:
            continue
        ahead = best < 0 or opened["worth"][i] > opened["worth"][best]
        equal = best >= 0 and opened["worth"][i] == opened["worth"][best]
        if ahead or (equal and opened["depth"][i] < opened["depth"][best]):
            best = i
    return best


@compiled
def _grow(text, places, matches, max_depth, tokens, above, evidence, exists):
    """Fill one trie [T] from the places of a text [n], by adding the best open node in turn."""
    opened = np.zeros(MATCHES, _OPEN)
    _branch(text, places, matches, (1 << places.shape[0]) - 1, -1, 0, 0.0, opened)
    for node in range(tokens.shape[0]):
        best = _best(opened)
        if best < 0:
            return
        each = opened[best]
        tokens[node], above[node], exists[node] = each["token"], each["above"], True
        evidence[node] = each["evidence"]
        members, depth, worth = each["places"], each["depth"], each["worth"]
        opened["places"][best] = 0
        if depth < max_depth:
            _branch(text, places, matches, members, node, depth, worth, opened)


@compiled(parallel=True, nogil=True)
def _look_up(texts, lengths, slots, tokens, above, evidence, exists, max_depth, window):
    """See `LookUp`."""
    for r in numba.prange(slots.shape[0]):
        tokens[r], above[r], evidence[r], exists[r] = 0, -1, 0, False
        if slots[r] < 0:
            continue
        text = texts[slots[r], : lengths[slots[r]]]
        places, matches = np.empty(MATCHES, np.int64), np.empty(MATCHES, np.int64)
        count = _find(text, window, places, matches)
        if count > 0:
            _grow(
                text, places[:count], matches, max_depth, tokens[r], above[r], evidence[r],
                exists[r],
            )  # fmt: skip


def look_up(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    trie: Trie,
    *,
    max_depth: int,
    window: int = WINDOW,
) -> None:
    """Fill ``trie`` with what followed earlier places that end as the texts do. See `LookUp`."""
    check_look_up(tokens, lengths, slots, trie)
    arrays = [each.numpy() for each in (tokens, lengths, slots, *trie)]
    searched = min(int(arrays[1][arrays[2]].sum()), len(slots) * window)
    use_torch_threads(len(slots) * _TRIE + searched // _TOKENS)
    _look_up(*arrays, max_depth, window)
