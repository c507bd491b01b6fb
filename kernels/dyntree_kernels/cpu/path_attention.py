"""Attention whose sums run in the order of positions, so that a row of a tree has the bits of a
plain row at its position, whatever else is in the tree or in the batch.

A row's tiles hold the positions that a plain row's hold: first those of the context, then the row's
ancestors from the root on. Tiles of context are shared, and so are those of chains, whose rows
stand where their positions are. In the last tiles each row of another tree has keys and values of
its own. Positions that a row does not see add zeros to its sums, which change no bit.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.simd import ROWS, count_bits, highest_bit, to_float
from dyntree_kernels.cpu.tiles import (
    ALL,
    TILE,
    attend_tile,
    begin,
    divide,
    load_latent,
    load_latents,
    load_tile,
    tile_views,
)

_ONE, _NONE = np.uint32(1), np.uint32(0)


@compiled
def row_spans(bits, ctx, window, place, first, last):
    """Fill first and last [rows] with the span of positions that each row sees.

    Return whether all rows are of a chain: their ancestors are the first columns. A row's position
    is that of its last ancestor; with a negative window rows follow one another from `place` after
    the context.
    """
    chained = True
    for i in range(bits.shape[0]):
        count, columns = 0, 0
        for word in range(bits.shape[1]):
            if bits[i, word] != _NONE:
                count += count_bits(bits[i, word])
                columns = 32 * word + highest_bit(np.uint64(bits[i, word])) + 1
        chained &= count == columns
        last[i] = ctx + count
        own = ctx + place + i + 1 if window < 0 else last[i]
        first[i] = max(own - abs(window), 0)
    return chained


@compiled
def _span_word(first, last, start):
    """Return the bits of the TILE positions from `start` that lie in first : last."""
    low, high = max(first - start, 0), min(last - start, TILE)
    if low >= high:
        return _NONE
    return (ALL << np.uint32(low)) & (ALL >> np.uint32(TILE - high))


@compiled
def span_words(words, first, last, heads, start):
    """Fill `words` [rows] as does `attention.seen_words`, for the spans of `row_spans`."""
    seen = _NONE
    for i in range(first.shape[0]):
        word = _span_word(first[i], last[i], start)
        seen |= word
        words[i * heads : (i + 1) * heads] = word
    return seen


@compiled
def sources(found, bits, ctx, start):
    """Fill found [TILE] with where the cache has the positions from `start` on a row's path."""
    for j in range(TILE):
        found[j] = start + j
    at = ctx - start
    for word in range(bits.shape[0]):
        rest = bits[word]
        if at + count_bits(rest) <= 0:
            at += count_bits(rest)
            continue
        while rest != _NONE and at < TILE:
            if at >= 0:
                lowest = rest & ~(rest - _ONE)
                found[at] = ctx + 32 * word + highest_bit(np.uint64(lowest))
            rest &= rest - _ONE
            at += 1


@compiled
def own_words(words, i, heads, word):
    """Let only tree row i see positions: those of `word`. Return the span of packed rows, a
    multiple of ROWS, in which its own are."""
    low = i * heads // ROWS * ROWS
    high = ((i + 1) * heads + ROWS - 1) // ROWS * ROWS
    words[low:high] = _NONE
    words[i * heads : (i + 1) * heads] = word
    return low, high


@compiled
def _load_position(tile_keys, tile_values, j, k_block, v_block, n, at, paired):
    """Copy position `at` of a block to position j of the tile."""
    d = tile_keys.shape[0]
    if not paired:
        for i in range(d):
            tile_keys[i, j] = to_float(k_block[i * n + at])
            tile_values[j, i] = to_float(v_block[at * d + i])
        return
    key, value = at // 16 * 16 * d + at % 16 * 2, at // 2 * 32 + at % 2
    for i in range(d):
        tile_keys[i, j] = to_float(k_block[key + i // 2 * 32 + i % 2])
        tile_values[j, i] = to_float(v_block[value + i // 16 * 16 * n + i % 16 * 2])


@compiled
def _load_wanted(
    tile_keys, tile_values, held, wanted, word, keys, values, n, paired, k_steps, v_steps, table
):
    """Copy the positions of `word` that the tile does not hold, which has some of another row."""
    for j in range(TILE):
        if (word >> np.uint32(j)) & _ONE == _NONE or held[j] == wanted[j]:
            continue
        held[j] = wanted[j]
        if values is None:
            load_latent(tile_keys, tile_values, j, keys, k_steps, n, table, held[j])
        else:
            page = held[j] // n
            block = np.int64(table[page]) if page < len(table) else np.int64(0)
            _load_position(
                tile_keys, tile_values, j, keys[block * k_steps[0] + k_steps[1] :],
                values[block * v_steps[0] + v_steps[1] :], n, held[j] % n, paired,
            )  # fmt: skip


@compiled
def path_attention(
    q, keys, values, n, paired, k_steps, v_steps, table, ctx, bits, heads, out, workspace, words,
    beyond, head, place,
):  # fmt: skip
    """Compute the attention of the rows of one chunk over one KV head, in the order of positions.

    The arguments are those of `attention._chunk_attention`. Without values, the keys are a cache of
    latent vectors, and `k_steps` those of `latent_attention`; `out` may then have fewer columns.
    """
    rows, d = q.shape
    tile_keys, tile_values, scores, state = tile_views(workspace, rows, d)
    begin(out, state, beyond, head, heads)
    count = bits.shape[0]
    spans, (held, wanted) = np.empty((2, count), np.int64), np.empty((2, TILE), np.int64)
    first, last = spans[0], spans[1]
    window = np.int64(1) << 62 if beyond is None else beyond[0]
    chained = row_spans(bits, ctx, window, place, first, last)
    for start in range(first.min() // TILE * TILE, last.max(), TILE):
        seen, shared = ALL, chained or start + TILE <= ctx
        masked = start < first.max() or start + TILE > last.min()
        if shared and masked:
            seen = span_words(words, first, last, heads, start)
            if seen == _NONE:
                continue
        if values is None:
            load_latents(tile_keys, tile_values, keys, k_steps, n, table, start, seen)
        else:
            load_tile(
                tile_keys, tile_values, keys, values, k_steps, v_steps, table, n, start, paired,
                seen,
            )  # fmt: skip
        for j in range(TILE):
            held[j] = start + j
        low, high = 0, rows
        for i in range(1 if shared else count):
            if not shared:
                word = _span_word(first[i], last[i], start)
                if word == _NONE:
                    continue
                low, high = own_words(words, i, heads, word)
                sources(wanted, bits[i], ctx, start)
                _load_wanted(
                    tile_keys, tile_values, held, wanted, word, keys, values, n, paired, k_steps,
                    v_steps, table,
                )  # fmt: skip
            cleared = attend_tile(
                q[low:high], tile_keys, tile_values, words[low:high], masked or not shared,
                beyond, scores[low:high], out[low:high], state[low:high],
            )  # fmt: skip
            for j in range(TILE if cleared != _NONE else 0):
                if (cleared >> np.uint32(j)) & _ONE:
                    held[j] = -1
    divide(out, state)
