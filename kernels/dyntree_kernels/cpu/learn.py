"""Update the acceptance estimate's logistic regressions by Newton's method, in one call."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numpy as np
import torch

from dyntree_kernels.contracts import Regression, check_learning
from dyntree_kernels.cpu.compiled import compiled


@compiled(error_model="numpy")
def _solve(a, v):
    """Return x of A x = v for symmetric A [3, 3], by Cramer's rule; not finite if A is singular."""
    rows = np.empty((3, 3))
    for i in range(3):
        b, c = a[(i + 1) % 3], a[(i + 2) % 3]
        for j in range(3):
            rows[i, j] = b[(j + 1) % 3] * c[(j + 2) % 3] - b[(j + 2) % 3] * c[(j + 1) % 3]
    determinant = (a[0] * rows[0]).sum()
    return (rows[0] * v[0] + rows[1] * v[1] + rows[2] * v[2]) / determinant


@compiled(error_model="numpy")
def _mark_observed(parents, path, count, observed, accepted):
    """Mark the observed and the accepted nodes of one tree; return the number of observed ones.

    A node is observed if it was verified and its parent is the root or an accepted node.
    parents [N]: parents of the nodes, of which the first `count` were verified. path [D]: accepted
    nodes. observed, accepted: bool [N], written.
    """
    accepted[:] = False
    for node in path:
        if node >= 0:
            accepted[node] = True
    seen = 0
    for node in range(observed.shape[0]):
        above = parents[node]
        observed[node] = node < count and (above < 0 or accepted[above])
        seen += observed[node]
    return seen


@compiled(error_model="numpy")
def _add(features, observed, accepted, weights, gradient, information):
    """Add the terms of one tree's observed nodes [N], at `weights`, to the two sums."""
    x = np.ones(3)
    for n in range(observed.shape[0]):
        if not observed[n]:
            continue
        x[1], x[2] = features[n, 0], features[n, 1]
        probability = 1 / (1 + math.exp(-(x * weights).sum()))
        residual = (1.0 if accepted[n] else 0.0) - probability
        curvature = probability * (1 - probability)
        for i in range(3):
            gradient[i] += residual * x[i]
            for j in range(3):
                information[i, j] += curvature * x[i] * x[j]


@compiled(error_model="numpy")
def _newton_steps(
    weights, information, prior, low, high, strength, memory, steps, features, parents, path,
    counts, slots, classes,
):  # fmt: skip
    """Update the regressions in double precision. See `Regression` and `Learn` for arguments."""
    requests, nodes = classes.shape[0], parents.shape[1]
    observed = np.empty((requests, nodes), np.bool_)
    accepted = np.empty((requests, nodes), np.bool_)
    seen = np.zeros(weights.shape[0])
    for r in range(requests):
        if classes[r] >= 0:
            # A request without observed nodes counts as one node.
            found = _mark_observed(parents[slots[r]], path[r], counts[r], observed[r], accepted[r])
            seen[classes[r]] += max(1, found)
    for index in range(weights.shape[0]):
        if seen[index] == 0:
            continue
        kept = math.exp(-seen[index] / memory)
        known = weights[index].astype(np.float64)
        remembered = kept * information[index].astype(np.float64)
        reverting = (1 - kept) * strength * np.eye(3)
        now, total, sound = known.copy(), remembered + reverting, True
        for _ in range(steps):
            total = remembered + reverting
            gradient = np.zeros(3)
            for i in range(3):
                gradient[i] = (remembered[i] * (known - now)).sum()
                gradient[i] += (reverting[i] * (prior - now)).sum()
            for r in range(requests):
                if classes[r] == index:
                    _add(features[slots[r]], observed[r], accepted[r], now, gradient, total)
            now = now + _solve(total, gradient)
            sound = sound and np.isfinite(now).all() and np.isfinite(total).all()
            now = np.minimum(np.maximum(now, low), high)
        weights[index] = now if sound else prior.astype(np.float64)
        information[index] = total if sound else strength * np.eye(3)


def learn(
    regression: Regression,
    features: torch.Tensor,
    parents: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    classes: torch.Tensor,
) -> None:
    """Learn which nodes the target accepted. See `Learn`."""
    check_learning(regression, features, parents, path, counts)
    state = (regression.weights, regression.information)
    known = (regression.prior, regression.low, regression.high)
    arrays = (features, parents, path, counts, slots, classes)
    _newton_steps(
        *(each.numpy() for each in (*state, *known)),
        regression.strength,
        regression.memory,
        regression.steps,
        *(each.numpy() for each in arrays),
    )


def warm_up() -> None:
    """Compile learning, or load it from disk, by a call that updates nothing."""
    one, three = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(3)
    weights, information = torch.zeros(1, 3), torch.zeros(1, 3, 3)
    regression = Regression(weights, information, three, three, three, 1.0, 1.0, 1)
    # These are columns of one array, as in the engine: numba compiles per memory layout.
    slots, classes = torch.full((1, 2), -1).unbind(1)
    learn(regression, torch.zeros(1, 1, 2), one, one, one[0], slots, classes)
