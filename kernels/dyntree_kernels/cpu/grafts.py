"""The nodes of tries in growth: take them over, let the draft judge them, and value their paths."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, KINDS, LOOK_UP
from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.gumbel import add_noise
from dyntree_kernels.cpu.simd import to_float

_ZERO = np.float32(0)
_NONE = np.float32(-np.inf)
_MAX_FEATURE = 20.0
_SUREST = float(np.float32(-1e-7))


class GraftArrays(NamedTuple):
    """The T nodes of every request's trie, [R, T] each; T is 0 without tries.

    ``tokens``, ``above`` and ``depths`` int64. ``edges`` and ``values`` float32: the log of the
    chance of a node below its parent, -inf for a node that does not exist, and that of its path.
    ``expansions`` int64: the expansion of a node, -1 for none. ``kinds`` int8. ``features`` float32
    [R, T, 2]. ``evidence`` float32. ``beside`` int8 [R, E]: the kind of the draft's candidates
    below every expansion.
    """

    tokens: np.ndarray
    above: np.ndarray
    depths: np.ndarray
    edges: np.ndarray
    values: np.ndarray
    expansions: np.ndarray
    kinds: np.ndarray
    features: np.ndarray
    evidence: np.ndarray
    beside: np.ndarray

    @classmethod
    def room(cls, requests: int, nodes: int, expansions: int) -> GraftArrays:
        """Allocate nodes that do not exist."""

        def filled(value: float, dtype: type) -> np.ndarray:
            return np.full((requests, nodes), value, dtype)

        return cls(
            tokens=filled(0, np.int64),
            above=filled(-1, np.int64),
            depths=filled(1, np.int64),
            edges=filled(-np.inf, np.float32),
            values=filled(-np.inf, np.float32),
            expansions=filled(-1, np.int64),
            kinds=filled(LOOK_UP, np.int8),
            features=np.zeros((requests, nodes, 2), np.float32),
            evidence=filled(0, np.float32),
            beside=np.full((requests, expansions), DRAFT, np.int8),
        )


@compiled
def clamp(x, low, high):
    return min(max(x, low), high)


@compiled
def log_probability(weights, features):
    """Return the log of the learned chance of a candidate with these features [2]."""
    x = weights[0] + weights[1] * features[0] + weights[2] * features[1]
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


@compiled
def _noise_at(seed, position, token):
    """Return the target sampler's noise of one token."""
    noise = np.zeros(1, np.float32)
    add_noise(noise, seed, position, token)
    return noise[0]


@compiled(error_model="numpy")
def take(
    grafts, tokens, above, evidence, exists, roots, temperatures, classes, seeds, chained, weights,
    noisy, levels,
):  # fmt: skip
    """Take over the tries of R requests [R, T] into `grafts`.

    Nodes deeper than `levels` [R] and tries of `chained` requests are left out. The other arguments
    are those of `RequestParams`; `weights` and `noisy` as for `pick_children`.
    """
    no_bias = np.array([0.0, 1.0, 0.0], np.float32)
    for r in range(roots.shape[0]):
        own = no_bias
        if weights.shape[0] > 0:
            own = weights[classes[r] * KINDS + LOOK_UP]
        for g in range(tokens.shape[1]):
            parent = above[r, g] if exists[r, g] else np.int64(-1)
            depth = np.int64(1)
            if parent >= 0:
                depth += grafts.depths[r, parent]
            real = exists[r, g] and not chained[r] and depth <= levels[r]
            real = real and evidence[r, g] == evidence[r, g] and tokens[r, g] >= 0
            if parent >= 0:
                real = real and grafts.edges[r, parent] > _NONE
            grafts.tokens[r, g] = tokens[r, g]
            grafts.above[r, g] = parent
            grafts.depths[r, g] = depth
            grafts.expansions[r, g] = -1
            grafts.kinds[r, g] = LOOK_UP
            grafts.edges[r, g] = _NONE
            if real:
                known = clamp(evidence[r, g], -_MAX_FEATURE, _MAX_FEATURE)
                grafts.evidence[r, g] = grafts.features[r, g, 0] = known
                grafts.features[r, g, 1] = 0
                if noisy and temperatures[r] > _ZERO:
                    position = roots[r] + depth - 1
                    grafts.features[r, g, 1] = _noise_at(seeds[r], position, tokens[r, g])
                grafts.edges[r, g] = log_probability(own, grafts.features[r, g])
        revalue(grafts, r)


@compiled
def revalue(grafts, r):
    """Value the paths of one request's nodes from their edges."""
    for g in range(grafts.above.shape[1]):
        parent = grafts.above[r, g]
        value = grafts.edges[r, g]
        if parent >= 0:
            value += grafts.values[r, parent]
        grafts.values[r, g] = value


@compiled
def note_kind(grafts, r, e, node):
    """Note the kind of the draft's candidates below expansion e of request r, and return it.

    `node` is the candidate that it expands, -1 for the root. This is a function because numba loses
    what a parallel loop writes to the arrays of a tuple directly.
    """
    kind = DRAFT
    for g in range(grafts.above.shape[1]):
        if grafts.above[r, g] == node and grafts.edges[r, g] > _NONE:
            kind = BESIDE
    grafts.beside[r, e] = kind
    return kind


@compiled(error_model="numpy")
def judge(
    grafts, r, node, logits, logsumexp, temperature, noisy, seed, position, weights, own_class,
    tokens, edges,
):  # fmt: skip
    """Let the draft judge the children of a trie's `node` (-1: the root) of request r.

    logits [V], logsumexp: the draft's, which `pick_children` has ranked. tokens, edges [K]: its
    best children there; those that are nodes of the trie get an edge of -inf.
    """
    for g in range(grafts.above.shape[1]):
        if grafts.above[r, g] != node or grafts.edges[r, g] == _NONE:
            continue
        token, score = grafts.tokens[r, g], _NONE
        if token < logits.shape[0]:
            score = to_float(logits[token])
        if temperature > _ZERO:
            score /= temperature
            if noisy:
                score += _noise_at(seed, position, token)
        log_draft = clamp(score - logsumexp, -_MAX_FEATURE, _SUREST)
        logit = log_draft - math.log(-math.expm1(log_draft))
        grafts.features[r, g, 0] = clamp(logit, -_MAX_FEATURE, _MAX_FEATURE)
        grafts.features[r, g, 1] = grafts.evidence[r, g]
        grafts.kinds[r, g] = BOTH
        if weights.shape[0] > 0:
            own = weights[own_class * KINDS + BOTH]
            grafts.edges[r, g] = log_probability(own, grafts.features[r, g])
        else:
            grafts.edges[r, g] = log_draft
        for k in range(tokens.shape[0]):
            if tokens[k] == token:
                edges[k] = _NONE
