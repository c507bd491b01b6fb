"""Tiles of keys, values and scores, of which tree attention makes an online softmax."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.simd import LANES, accumulate, exp, row_maximum, tanh, to_float, widen

TILE = 32  # cache positions per step of the online softmax; one word is a row's mask of them
MASKED = np.float32(-np.inf)
ZERO = np.float32(0)
ALL = np.uint32(0xFFFFFFFF)
_INFINITY = np.float32(np.inf)
_UNROLLED = {"reassoc", "contract", "nsz"}  # lets sums vectorise, and keeps NaN


@compiled
def load_keys(dst, block, n, start, paired):
    """Copy the TILE positions from `start` of a block's keys into dst[D, TILE]."""
    d = dst.shape[0]
    if not paired:
        for i in range(d):
            for j in range(0, TILE, LANES):
                widen(dst, i, j, block, i * n + start + j)
        return
    for group in range(TILE // LANES):
        base = (start // LANES + group) * d * LANES
        for pair in range(d // 2):
            row = block[base + pair * 2 * LANES : base + (pair + 1) * 2 * LANES]
            for e in range(2):
                for j in range(LANES):
                    dst[2 * pair + e, group * LANES + j] = to_float(row[2 * j + e])


@compiled
def load_values(dst, block, n, start, paired, seen):
    """Copy the TILE positions from `start` of a block's values into dst[TILE, D].

    Values at positions outside the bit mask `seen` become zero. Their weight is zero, but its
    product with a value that is not finite would be NaN.
    """
    d = dst.shape[1]
    if not paired:
        for j in range(TILE):
            for i in range(0, d, LANES):
                widen(dst, j, i, block, (start + j) * d + i)
    else:
        for group in range(d // LANES):
            base = (group * n + start) * LANES
            for pair in range(TILE // 2):
                row = block[base + pair * 2 * LANES : base + (pair + 1) * 2 * LANES]
                for e in range(2):
                    for i in range(LANES):
                        dst[2 * pair + e, group * LANES + i] = to_float(row[2 * i + e])
    if seen != ALL:
        for j in range(TILE):
            if (seen >> np.uint32(j)) & np.uint32(1) == 0:
                dst[j, :] = ZERO


@compiled
def load_tile(
    tile_keys, tile_values, keys, values, k_steps, v_steps, table, n, start, paired, seen
):
    """Copy the TILE positions from `start` of a request's keys and values, as do `load_keys` and
    `load_values`. k_steps, v_steps: block stride, and offset of the KV head."""
    page = start // n
    block = np.int64(table[page]) if page < len(table) else np.int64(0)
    k_block = keys[block * k_steps[0] + k_steps[1] :]
    v_block = values[block * v_steps[0] + v_steps[1] :]
    load_keys(tile_keys, k_block, n, start % n, paired)
    load_values(tile_values, v_block, n, start % n, paired, seen)


@compiled
def _load_vector(values, j, cache, steps, n, table, position):
    place = position // n
    block = np.int64(table[place]) if place < len(table) else np.int64(0)
    at = block * steps[0] + position % n * steps[1]
    for i in range(0, values.shape[1], LANES):
        widen(values, j, i, cache, at + i)


@compiled
def load_latent(keys, values, j, cache, steps, n, table, position):
    """Copy the latent vector of a position to position j of keys [D, TILE] and values [TILE, D].

    steps: of a block and of a position in the cache.
    """
    _load_vector(values, j, cache, steps, n, table, position)
    for i in range(values.shape[1]):
        keys[i, j] = values[j, i]


@compiled
def load_latents(keys, values, cache, steps, n, table, start, seen):
    """As `load_latent`, the TILE positions from `start`. Those outside the bit mask `seen` become
    zero."""
    for j in range(TILE):
        if (seen >> np.uint32(j)) & np.uint32(1):
            _load_vector(values, j, cache, steps, n, table, start + j)
        else:
            values[j, :] = ZERO
    for i in range(values.shape[1]):
        for j in range(TILE):
            keys[i, j] = values[j, i]


@compiled(fastmath=_UNROLLED)
def cap_scores(scores, cap):
    inverse = np.float32(1) / cap
    for i in range(scores.shape[0]):
        for j in range(TILE):
            scores[i, j] = cap * tanh(scores[i, j] * inverse)


@compiled
def mask_scores(scores, words):
    for i in range(scores.shape[0]):
        word = words[i]
        for j in range(TILE):
            if (word >> np.uint32(j)) & np.uint32(1) == 0:
                scores[i, j] = MASKED


@compiled(fastmath=_UNROLLED)
def softmax_step(scores, sums, state):
    """Turn a tile of scores into weights, and rescale the running sums to the new maxima.

    The weight of a masked score is 0. A score that is NaN makes its row NaN.
    """
    for i in range(scores.shape[0]):
        high = state[i, 0]
        found = row_maximum(scores, i)
        top = found if found > high else high
        if top > high:
            shrink = exp(high - top)
            state[i, 0] = top
            state[i, 1] *= shrink
            for j in range(sums.shape[1]):
                sums[i, j] *= shrink
        total = ZERO
        # In a row that has seen no position yet, top is -inf, and -inf - top would be NaN.
        shift = top if top > MASKED else ZERO
        for j in range(TILE):
            weight = exp(scores[i, j] - shift)
            scores[i, j] = weight
            total += weight
        state[i, 1] += total


@compiled
def add_non_finite(out, scores, values, words):
    """Add values that are not all finite to the rows that see their positions, and clear them.
    Values may have more columns than `out`, which do not count.

    The product of all weights and values would give NaN to rows that do not see them. Return the
    bits of the positions that were cleared.
    """
    cleared = np.uint32(0)
    for j in range(TILE):
        infinite = np.int32(0)
        for k in range(out.shape[1]):
            infinite += np.int32(not abs(values[j, k]) < _INFINITY)
        if infinite > 0:
            for i in range(out.shape[0]):
                if (words[i] >> np.uint32(j)) & np.uint32(1):
                    for k in range(out.shape[1]):
                        out[i, k] += scores[i, j] * values[j, k]
            values[j, :] = ZERO
            cleared |= np.uint32(1) << np.uint32(j)
    return cleared


@compiled
def tile_views(workspace, rows, d):
    """Return keys [D, TILE], values [TILE, D], scores [rows, TILE], and each row's maximum and sum
    of the weights [rows, 2], in working memory."""
    keys = workspace[: d * TILE].reshape(d, TILE)
    values = workspace[d * TILE : 2 * d * TILE].reshape(TILE, d)
    at = 2 * d * TILE
    scores = workspace[at : at + rows * TILE].reshape(rows, TILE)
    at += rows * TILE
    return keys, values, scores, workspace[at : at + 2 * rows].reshape(rows, 2)


@compiled
def begin(out, state, beyond, head, heads):
    """Begin the sums of rows, with a weight for each row's sink, which has no value; -inf for no
    sink. beyond: as in `attention`."""
    state[:, 0] = MASKED
    state[:, 1] = ZERO
    out[:, :] = ZERO
    if beyond is not None:
        sinks = beyond[2]
        for i in range(state.shape[0]):
            state[i, 0] = sinks[head + i % heads]
            state[i, 1] = np.float32(state[i, 0] > MASKED)


@compiled
def attend_tile(q, keys, values, words, masked, beyond, scores, out, state):
    """Do one step of the online softmax over the TILE positions of keys and values.

    Return the bits of the values that were cleared. words: of the positions that rows see, if they
    are ``masked``. beyond: as in `attention`.
    """
    cleared = np.uint32(0)
    scores[:, :] = ZERO
    accumulate(scores, q, keys)
    if beyond is not None and beyond[1] > ZERO:
        cap_scores(scores, beyond[1])
    if masked:
        mask_scores(scores, words)
    softmax_step(scores, out, state)
    if masked:
        cleared = add_non_finite(out, scores, values, words)
    accumulate(out, scores, values)
    return cleared


@compiled
def divide(out, state):
    for i in range(out.shape[0]):
        if state[i, 1] == ZERO:
            continue  # The row sees no position.
        inverse = np.float32(1) / state[i, 1]
        for j in range(out.shape[1]):
            out[i, j] *= inverse
