"""Newton steps of logistic regressions with three weights, one per class of rows."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# Compiled functions take what numba infers; their docstrings give shapes.

from __future__ import annotations

import math

import numba
import numpy as np


@numba.njit(cache=True, error_model="numpy")
def _solve(a, v):
    """x of A x = v for symmetric A [3, 3], by Cramer's rule; not finite where there is none."""
    rows = np.empty((3, 3))
    for i in range(3):
        b, c = a[(i + 1) % 3], a[(i + 2) % 3]
        for j in range(3):
            rows[i, j] = b[(j + 1) % 3] * c[(j + 2) % 3] - b[(j + 2) % 3] * c[(j + 1) % 3]
    determinant = (a[0] * rows[0]).sum()
    return (rows[0] * v[0] + rows[1] * v[1] + rows[2] * v[2]) / determinant


@numba.njit(cache=True, error_model="numpy")
def _learn(of_class, features, judged, taken, classes, weights, gradient, information):
    """Add what the judged nodes [R, N] of one class say at `weights` to the two sums."""
    x = np.ones(3)
    for r in range(classes.shape[0]):
        if classes[r] != of_class:
            continue
        for n in range(judged.shape[1]):
            if not judged[r, n]:
                continue
            x[1], x[2] = features[r, n, 0], features[r, n, 1]
            chance = 1 / (1 + math.exp(-(x * weights).sum()))
            surprise = (1.0 if taken[r, n] else 0.0) - chance
            curvature = chance * (1 - chance)
            for i in range(3):
                gradient[i] += surprise * x[i]
                for j in range(3):
                    information[i, j] += curvature * x[i] * x[j]


@numba.njit(cache=True, error_model="numpy")
def newton_steps(
    features, judged, taken, classes, memory, steps, prior, prior_information, low, high, weights,
    information,
):  # fmt: skip
    """One observation, as `AcceptanceEstimate.observe` defines it, in double precision.

    features float32 [R, N, 2], judged, taken bool [R, N], classes int64 [R]; prior, low, high
    float32 [3], prior_information [3, 3]; weights float32 [C, 3], information [C, 3, 3]: updated.
    """
    for of_class in range(weights.shape[0]):
        seen = 0
        for r in range(classes.shape[0]):
            if classes[r] == of_class:
                seen += max(1, judged[r].sum())
        if seen == 0:
            continue
        kept = math.exp(-seen / memory)
        known = weights[of_class].astype(np.float64)
        remembered = kept * information[of_class].astype(np.float64)
        reverting = (1 - kept) * prior_information.astype(np.float64)
        now, total, sound = known.copy(), remembered + reverting, True
        for _ in range(steps):
            total = remembered + reverting
            gradient = np.zeros(3)
            for i in range(3):
                gradient[i] = (remembered[i] * (known - now)).sum()
                gradient[i] += (reverting[i] * (prior - now)).sum()
            _learn(of_class, features, judged, taken, classes, now, gradient, total)
            now = now + _solve(total, gradient)
            sound = sound and np.isfinite(now).all() and np.isfinite(total).all()
            now = np.minimum(np.maximum(now, low), high)
        weights[of_class] = now if sound else prior.astype(np.float64)
        information[of_class] = total if sound else prior_information.astype(np.float64)
