"""Newton steps of the acceptance estimate's logistic regressions in one call."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# Compiled functions take what numba infers; their docstrings give shapes.

from __future__ import annotations

import math

import numpy as np
import torch

from dyntree_kernels.contracts import Regression, check_learning
from dyntree_kernels.cpu.compiled import compiled


@compiled(error_model="numpy")
def _solve(a, v):
    """x of A x = v for symmetric A [3, 3], by Cramer's rule; not finite where there is none."""
    rows = np.empty((3, 3))
    for i in range(3):
        b, c = a[(i + 1) % 3], a[(i + 2) % 3]
        for j in range(3):
            rows[i, j] = b[(j + 1) % 3] * c[(j + 2) % 3] - b[(j + 2) % 3] * c[(j + 1) % 3]
    determinant = (a[0] * rows[0]).sum()
    return (rows[0] * v[0] + rows[1] * v[1] + rows[2] * v[2]) / determinant


@compiled(error_model="numpy")
def _judged(parents, path, count, judged, taken):
    """Mark the nodes of one tree that the target judged, and of these those that it took; how many
    it judged.

    parents [N], path [D], of which the first `count` nodes were verified; judged, taken bool [N]:
    written.
    """
    taken[:] = False
    for node in path:
        if node >= 0:
            taken[node] = True
    seen = 0
    for node in range(judged.shape[0]):
        above = parents[node]
        judged[node] = node < count and (above < 0 or taken[above])
        seen += judged[node]
    return seen


@compiled(error_model="numpy")
def _add(features, judged, taken, weights, gradient, information):
    """Add what the judged nodes [N] of one tree say at `weights` to the two sums."""
    x = np.ones(3)
    for n in range(judged.shape[0]):
        if not judged[n]:
            continue
        x[1], x[2] = features[n, 0], features[n, 1]
        chance = 1 / (1 + math.exp(-(x * weights).sum()))
        surprise = (1.0 if taken[n] else 0.0) - chance
        curvature = chance * (1 - chance)
        for i in range(3):
            gradient[i] += surprise * x[i]
            for j in range(3):
                information[i, j] += curvature * x[i] * x[j]


@compiled(error_model="numpy")
def _newton_steps(
    weights, information, prior, low, high, strength, memory, steps, features, parents, path,
    counts, slots, classes,
):  # fmt: skip
    """In double precision; the arguments are Regression's and those of `Learn`."""
    requests, nodes = classes.shape[0], parents.shape[1]
    judged, taken = np.empty((requests, nodes), np.bool_), np.empty((requests, nodes), np.bool_)
    seen = np.zeros(weights.shape[0])
    for r in range(requests):
        if classes[r] >= 0:
            # A request without judged nodes counts for one.
            of_tree = _judged(parents[slots[r]], path[r], counts[r], judged[r], taken[r])
            seen[classes[r]] += max(1, of_tree)
    for of_class in range(weights.shape[0]):
        if seen[of_class] == 0:
            continue
        kept = math.exp(-seen[of_class] / memory)
        known = weights[of_class].astype(np.float64)
        remembered = kept * information[of_class].astype(np.float64)
        reverting = (1 - kept) * strength * np.eye(3)
        now, total, sound = known.copy(), remembered + reverting, True
        for _ in range(steps):
            total = remembered + reverting
            gradient = np.zeros(3)
            for i in range(3):
                gradient[i] = (remembered[i] * (known - now)).sum()
                gradient[i] += (reverting[i] * (prior - now)).sum()
            for r in range(requests):
                if classes[r] == of_class:
                    _add(features[slots[r]], judged[r], taken[r], now, gradient, total)
            now = now + _solve(total, gradient)
            sound = sound and np.isfinite(now).all() and np.isfinite(total).all()
            now = np.minimum(np.maximum(now, low), high)
        weights[of_class] = now if sound else prior.astype(np.float64)
        information[of_class] = total if sound else strength * np.eye(3)


def learn(
    regression: Regression,
    features: torch.Tensor,
    parents: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    classes: torch.Tensor,
) -> None:
    """Learn as in `Learn`."""
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
    """Compile learning, or load it from disk, by a lesson that teaches nothing."""
    one, three = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(3)
    weights, information = torch.zeros(1, 3), torch.zeros(1, 3, 3)
    regression = Regression(weights, information, three, three, three, 1.0, 1.0, 1)
    # Columns of one array, as the engine's are.
    slots, classes = torch.full((1, 2), -1).unbind(1)
    learn(regression, torch.zeros(1, 1, 2), one, one, one[0], slots, classes)
