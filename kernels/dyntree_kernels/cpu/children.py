"""Find the best children of draft rows, and the probability that each is accepted.

One pass over the vocabulary computes both.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numba
import numpy as np

from dyntree_kernels.contracts import BESIDE, KINDS
from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.grafts import clamp, judge, log_probability, note_kind
from dyntree_kernels.cpu.gumbel import add_noise
from dyntree_kernels.cpu.simd import exp, to_float

_BLOCK = 1024  # scores that are processed together; they fit in L1
SPAN = 64  # scores that are compared together with the worst of the best ones
_ZERO = np.float32(0)
_NONE = np.float32(-np.inf)
_MAX_FEATURE = 20.0
_SUREST = float(np.float32(-1e-7))


@compiled(error_model="numpy")
def _load_scores(scores, logits, temperature, noisy, seed, position, first):
    """Fill scores with those of the tokens from `first` on, and the rest with -inf."""
    count = logits.shape[0]
    for i in range(count):
        scores[i] = to_float(logits[i])
    if temperature > _ZERO:
        for i in range(count):
            scores[i] /= temperature
        if noisy:
            add_noise(scores[:count], seed, position, first)
    scores[count:] = _NONE


@compiled
def _has_nan(scores):
    found = np.int32(0)
    for i in range(scores.shape[0]):
        found += np.int32(scores[i] != scores[i])
    return found > 0


@compiled
def _insert(best, tokens, score, token):
    """Insert a score that is above the last of `best` in descending order, after equal scores."""
    at = best.shape[0] - 1
    while at > 0 and best[at - 1] < score:
        best[at], tokens[at] = best[at - 1], tokens[at - 1]
        at -= 1
    best[at], tokens[at] = score, token


@compiled
def rank(scores, first, best, tokens):
    """Merge scores, a multiple of SPAN, into the best, in descending order. Of equals, the lowest
    token is first."""
    last = best.shape[0] - 1
    for start in range(0, scores.shape[0], SPAN):
        span = scores[start : start + SPAN]
        least = best[last]
        better = np.int32(0)
        for i in range(SPAN):
            better += np.int32(span[i] > least)
        if better > 0:
            for i in range(SPAN):
                if span[i] > best[last]:
                    _insert(best, tokens, span[i], first + start + i)


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _sum_exp(scores, top):
    total = _ZERO
    for i in range(scores.shape[0]):
        total += exp(scores[i] - top)
    return total


@compiled
def best_scores(logits, temperature, noisy, seed, position, best, tokens):
    """Fill best and tokens [K], and return the logsumexp of all scores.

    Returns NaN if a score is NaN, or if all are -inf.
    """
    scores = np.empty(_BLOCK, np.float32)
    best[:] = _NONE
    tokens[:] = 0
    total, top = 0.0, _NONE
    for first in range(0, logits.shape[0], _BLOCK):
        block = logits[first : first + _BLOCK]
        rows = (block.shape[0] + SPAN - 1) // SPAN * SPAN
        filled = scores[:rows]
        _load_scores(filled, block, temperature, noisy, seed, position, first)
        if _has_nan(filled):
            return np.nan
        rank(filled, first, best, tokens)
        if best[0] > top:
            total *= math.exp(top - best[0])
            top = best[0]
        if top > _NONE:
            total += _sum_exp(filled, top)
    return top + math.log(total) if total > 0 else np.nan


@compiled
def _estimate(best, logsumexp, weights, features, edges):
    """Fill features [K, 2] and edges [K] of the candidates with the best scores.

    An edge is the log of the learned acceptance probability.
    """
    first = clamp(best[0] - logsumexp, -_MAX_FEATURE, _SUREST)
    second = clamp(best[1] - logsumexp, -_MAX_FEATURE, _SUREST)
    for k in range(edges.shape[0]):
        log_draft = clamp(best[k] - logsumexp, -_MAX_FEATURE, _SUREST)
        logit = log_draft - math.log(-math.expm1(log_draft))
        margin = first - second if k == 0 else log_draft - first
        features[k, 0] = clamp(logit, -_MAX_FEATURE, _MAX_FEATURE)
        features[k, 1] = clamp(margin, -_MAX_FEATURE, _MAX_FEATURE)
        edges[k] = log_probability(weights, features[k]) if best[k] > _NONE else _NONE


@compiled(parallel=True, nogil=True, error_model="numpy")
def pick_children(
    logits, step, vocab, noisy, temperatures, classes, seeds, chained, positions, weights,
    expansions, nodes, grafts, bases, tokens, edges, features, drawn,
):  # fmt: skip
    """Find the best children of the rows, and the log of their estimated acceptance probability.

    logits: memory of R * W rows of `vocab` entries, `step` apart; W rows per request.
    noisy: whether to add the target sampler's noise where the temperature is above 0.
    temperatures, classes, seeds, chained (whether a row gets one child): [R].
    positions [R, E]: positions of the tokens that expansions run on.
    weights [classes * KINDS, 3]: weights of the learned acceptance probability. If there are none,
    the draft's probability takes its place.
    expansions: the first expansion of the rows, and W.
    nodes [R, E]: candidates that expansions run on. grafts: `GraftArrays`, judged.
    bases [R, E]: -inf for rows to skip.
    tokens, edges [R, E, K] and features [R, E, K, 2 or 0] are written.
    drawn: whether the children of rows at a temperature above 0 are drawn, and left out here.

    If a row's scores contain a NaN or are all -inf, it has no children: their edges are -inf.
    """
    start, width = expansions
    children = tokens.shape[2]
    kept = max(2, children)
    for row in numba.prange(temperatures.shape[0] * width):
        r, e = row // width, start + row % width
        if bases[r, e] == _NONE:
            continue
        kind = note_kind(grafts, r, e, nodes[r, e])
        if drawn and temperatures[r] > _ZERO:
            continue
        best, found = np.empty(kept, np.float32), np.empty(kept, np.int64)
        logsumexp = best_scores(
            logits[row * step : row * step + vocab], temperatures[r], noisy, seeds[r],
            positions[r, e], best, found,
        )  # fmt: skip
        tokens[r, e] = found[:children]
        if not math.isfinite(logsumexp):
            edges[r, e] = _NONE
        elif weights.shape[0] > 0:
            own = weights[classes[r] * KINDS + kind]
            _estimate(best, logsumexp, own, features[r, e], edges[r, e])
        else:
            for k in range(children):
                edges[r, e, k] = min(best[k] - logsumexp, 0.0)
        if chained[r]:
            edges[r, e, 1:] = _NONE
        if kind == BESIDE and math.isfinite(logsumexp):
            judge(
                grafts, r, nodes[r, e], logits[row * step : row * step + vocab], logsumexp,
                temperatures[r], noisy, seeds[r], positions[r, e], weights, classes[r],
                tokens[r, e], edges[r, e],
            )  # fmt: skip
