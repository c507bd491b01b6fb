"""Sampling parameters that read earlier tokens, for one row of logits.

vLLM's kernels on the CPU, which read the rows before, and those for paths share this code.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import numpy as np

from dyntree_kernels.cpu.compiled import compiled

FORCED_LOGIT = np.float32(1.0e9)


@compiled(error_model="numpy")
def penalize_row(values, counts, drafts, prompt_mask, rep, freq, pres):
    """Penalize the logits `values` float32 [V], in place.

    counts int32 [at least V]: tokens of the committed output. drafts int32 [length]: tokens after
    them that count as output. prompt_mask int32 [words]: a bit per token.
    """
    one, zero = np.float32(1), np.float32(0)
    vocab = values.shape[0]
    counts = counts[:vocab].copy()
    for token in drafts:
        if 0 <= token < vocab:
            counts[token] += 1
    for token in range(vocab):
        value, count = values[token], counts[token]
        seen = count > 0
        if rep != one and (seen or (prompt_mask[token >> 5] >> (token & 31)) & 1):
            value *= one / rep if value > zero else rep
        value -= freq * np.float32(count)
        value -= pres * np.float32(seen)
        values[token] = value


@compiled
def is_suffix(prefix, committed, drafts):
    """Return whether the committed tokens, then the drafts, end with `prefix`; all are 1-D."""
    start = committed.shape[0] + drafts.shape[0] - prefix.shape[0]
    if start < 0:
        return False
    for i in range(prefix.shape[0]):
        at = start + i - committed.shape[0]
        actual = drafts[at] if at >= 0 else committed[start + i]
        if actual != prefix[i]:
            return False
    return True


@compiled
def last_match(tokens, marker, first, last):
    """Return the largest start in [first, last) at which `tokens` have `marker`, or -1."""
    for start in range(min(last, tokens.shape[0] - marker.shape[0] + 1) - 1, first - 1, -1):
        if np.array_equal(tokens[start : start + marker.shape[0]], marker):
            return start
    return -1


@compiled
def forced_token(tokens, committed, budget, start, end, start_marker, end_marker, forced):
    """Return the token that must come next, or -1. `tokens[committed:]` are drafts."""
    length = tokens.shape[0]
    first = max(0, committed - start_marker.shape[0] + 1)
    start = max(start, last_match(tokens, start_marker, first, length))
    first = max(0, committed - end_marker.shape[0] + 1)
    end = max(end, last_match(tokens, end_marker, first, length))
    if start < 0 or start <= end or length - (start + start_marker.shape[0]) < budget:
        return -1
    done = 0
    for prefix in range(1, min(forced.shape[0] - 1, length) + 1):
        if np.array_equal(tokens[length - prefix :], forced[:prefix]):
            done = prefix
    return forced[done]
