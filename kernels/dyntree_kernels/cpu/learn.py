"""Update the acceptance estimate's logistic regressions by Newton's method, in one call."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.learning import Regression, check_learning


@compiled
def _cross(a, b):
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


@compiled
def _dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@compiled(error_model="numpy")
def _solve(a, v):
    """Return x of A x = v for symmetric A [3, 3], by Cramer's rule; not finite if A is singular."""
    columns = _cross(a[1], a[2]), _cross(a[2], a[0]), _cross(a[0], a[1])
    determinant = _dot(a[0], columns[0])
    return (
        _dot(columns[0], v) / determinant,
        _dot(columns[1], v) / determinant,
        _dot(columns[2], v) / determinant,
    )


@compiled(error_model="numpy")
def _mark_observed(parents, path, count, own, accepted):
    """Mark the accepted nodes of one tree; set `own` to -1 for nodes that were not observed.

    A node is observed if it was verified and its parent is the root or an accepted node.
    parents [N]: parents of the nodes, of which the first `count` were verified. path [D]: accepted
    nodes. own int64 [N] and accepted bool [N] are written.
    """
    accepted[:] = False
    for node in path:
        if node >= 0:
            accepted[node] = True
    for node in range(own.shape[0]):
        above = parents[node]
        if node >= count or not (above < 0 or accepted[above]):
            own[node] = -1


@compiled(error_model="numpy")
def _sort_observed(kinds_each, regressions, features, kinds, parents, path, counts, slots, classes):
    """Sort the observed nodes by their regressions, of which each class has `kinds_each`.

    Returns for each regression the number of nodes for which it forgets; and the end of its nodes
    among the M observed ones, whose features [M, 2] and acceptance [M] follow.
    """
    requests, nodes = classes.shape[0], parents.shape[1]
    own = np.full((requests, nodes), -1)
    accepted = np.empty((requests, nodes), np.bool_)
    seen, ends = np.zeros(regressions, np.int64), np.zeros(regressions, np.int64)
    found = np.zeros(kinds_each, np.int64)
    for r in range(requests):
        if classes[r] < 0:
            continue
        own[r] = kinds[slots[r]]
        _mark_observed(parents[slots[r]], path[r], counts[r], own[r], accepted[r])
        found[:] = 0
        for n in range(nodes):
            if own[r, n] >= 0:
                found[own[r, n]] += 1
                own[r, n] += classes[r] * kinds_each
        for kind in range(kinds_each):
            index = classes[r] * kinds_each + kind
            # A request without observed nodes of a kind counts as one node.
            seen[index] += max(1, found[kind])
            ends[index] += found[kind]
    ends = np.cumsum(ends)
    next_free = np.zeros(regressions, np.int64)
    next_free[1:] = ends[:-1]
    x, taken = np.empty((ends[-1], 2)), np.empty(ends[-1], np.bool_)
    for r in range(requests):
        for n in range(nodes):
            if own[r, n] >= 0:
                at = next_free[own[r, n]]
                next_free[own[r, n]] += 1
                x[at], taken[at] = features[slots[r], n], accepted[r, n]
    return seen, ends, x, taken


@compiled(error_model="numpy")
def _add(features, taken, weights, gradient, information):
    """Add the terms of nodes with these features [M, 2], at `weights`, to the two sums."""
    for n in range(taken.shape[0]):
        x = (1.0, features[n, 0], features[n, 1])
        probability = 1 / (1 + math.exp(-_dot(x, weights)))
        residual = (1.0 if taken[n] else 0.0) - probability
        curvature = probability * (1 - probability)
        for i in range(3):
            gradient[i] += residual * x[i]
            for j in range(3):
                information[i, j] += curvature * x[i] * x[j]


@compiled(error_model="numpy")
def _update(weights, information, prior, low, high, strength, kept, steps, features, taken):
    """Update one regression in double precision; its earlier information counts for `kept`."""
    known, remembered = weights.astype(np.float64), kept * information.astype(np.float64)
    back = (1 - kept) * strength
    now, gradient, total, sound = known.copy(), np.empty(3), np.empty((3, 3)), True
    for _ in range(steps):
        total[:] = remembered
        moved = (known[0] - now[0], known[1] - now[1], known[2] - now[2])
        for i in range(3):
            total[i, i] += back
            gradient[i] = _dot(remembered[i], moved) + back * (prior[i] - now[i])
        _add(features, taken, now, gradient, total)
        step = _solve(total, gradient)
        sound = sound and math.isfinite(total.sum())
        for i in range(3):
            now[i] += step[i]
            sound = sound and math.isfinite(now[i])
            now[i] = min(max(now[i], low[i]), high[i])
    weights[:] = now if sound else prior.astype(np.float64)
    information[:] = total if sound else strength * np.eye(3)


@compiled(error_model="numpy")
def _learn(
    weights, information, prior, low, high, strength, memory, steps, features, kinds, parents,
    path, counts, slots, classes,
):  # fmt: skip
    """Update the regressions. See `Regression` and `Learn` for arguments."""
    kinds_each = prior.shape[0]
    seen, ends, x, taken = _sort_observed(
        kinds_each, weights.shape[0], features, kinds, parents, path, counts, slots, classes
    )
    first = 0
    for index in range(weights.shape[0]):
        if seen[index] > 0:
            kept = math.exp(-seen[index] / memory)
            _update(
                weights[index], information[index], prior[index % kinds_each], low, high, strength,
                kept, steps, x[first : ends[index]], taken[first : ends[index]],
            )  # fmt: skip
        first = ends[index]


def learn(
    regression: Regression,
    features: torch.Tensor,
    kinds: torch.Tensor,
    parents: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    classes: torch.Tensor,
) -> None:
    """Learn which nodes the target accepted. See `Learn`."""
    check_learning(regression, features, kinds, parents, path, counts)
    state = (regression.weights, regression.information)
    known = (regression.prior, regression.low, regression.high)
    # Columns of an array, whose layout would depend on the number of requests.
    columns = slots.contiguous(), classes.contiguous()
    arrays = (features, kinds, parents, path, counts, *columns)
    _learn(
        *(each.numpy() for each in (*state, *known)),
        regression.strength,
        regression.memory,
        regression.steps,
        *(each.numpy() for each in arrays),
    )
