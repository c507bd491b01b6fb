"""The chance that a candidate is accepted: its features, and what is learned of them, in Triton.

`dyntree_plugin.tree.value` has the same in plain torch.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dyntree_kernels.contracts import KINDS

MAX_FEATURE = tl.constexpr(20.0)
SUREST = tl.constexpr(-1e-7)
_KINDS = tl.constexpr(KINDS)


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _log_not_exp(x):
    """Return log(1 - exp(x)) for x < 0. Near 0 it is a series of degree 8, since the difference
    would lose it."""
    p = 1.0 + x * (1.0 / 9.0)
    p = 1.0 + x * p * (1.0 / 8.0)
    p = 1.0 + x * p * (1.0 / 7.0)
    p = 1.0 + x * p * (1.0 / 6.0)
    p = 1.0 + x * p * (1.0 / 5.0)
    p = 1.0 + x * p * (1.0 / 4.0)
    p = 1.0 + x * p * (1.0 / 3.0)
    p = 1.0 + x * p * (1.0 / 2.0)
    return tl.log(tl.where(x > -0.5, -x * p, 1.0 - tl.exp(x)))


@triton.jit
def logit_of(log_chance):
    """Return the logit of a chance below 1 that is given by its log."""
    return log_chance - _log_not_exp(log_chance)


@triton.jit
def log_sigmoid(x):
    small = tl.exp(-tl.abs(x))
    # log(1 + small), corrected for the rounding of the sum.
    total = 1.0 + small
    rounded = tl.where(total == 1.0, 1.0, total - 1.0)
    return tl.minimum(x, 0.0) - tl.where(total == 1.0, small, tl.log(total) * (small / rounded))


@triton.jit
def learned(WEIGHTS, own_class, kind, first, second):
    """Return the log of the learned chance of candidates with these two features."""
    weights = WEIGHTS + (own_class * _KINDS + kind) * 3
    x = tl.load(weights) + tl.load(weights + 1) * first + tl.load(weights + 2) * second
    return log_sigmoid(x)
