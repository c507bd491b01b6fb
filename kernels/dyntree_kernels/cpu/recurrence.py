"""The gated delta rule and Mamba-2's state space over sequences and trees of tokens, on the CPU.

A task runs one head of one request. The states that it needs, of every row of a tree or one of a
sequence, fit into a core's cache. Sums are in float32, and states are rounded to their own type
after every token, as vLLM's decoding rounds them.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

from math import exp, log1p, sqrt
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.simd import LANES, as_numpy, from_float, to_float, towards_zero
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.recurrence import TreeStates

_FUSED = {"contract", "nsz"}
_EPSILON = np.float32(1e-5)  # as in vLLM's CPU kernels
_LINEAR = np.float32(20)  # Above it, softplus is the identity.
_ZERO, _ONE = np.float32(0), np.float32(1)


class Order(NamedTuple):
    """Which state each of T tokens of S requests continues, and where its own goes.

    ``slots`` int64 [S]: the requests' states, all different. ``starts`` int64 [S + 1]: request s
    has the tokens starts[s] : starts[s + 1]. ``above``, ``own`` int64 [T]: places among the states
    of a request, the first of which is that in its slot. ``places``: their number. ``keep``:
    whether the first one is written back.
    """

    slots: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    above: np.ndarray[Any, Any]
    own: np.ndarray[Any, Any]
    places: int
    keep: bool


def sequences(slots: torch.Tensor, starts: torch.Tensor) -> Order:
    """Return the order of tokens that follow each other, and advance their requests' states."""
    first = np.zeros(int(starts[-1]), np.int64)
    return Order(slots.long().numpy(), starts.long().numpy(), first, first, 1, keep=True)


def trees(states: TreeStates) -> Order:
    """Return the order of trees, which leave the states as they are."""
    first = states.starts[states.requests]
    own = torch.arange(len(first)) - first + 1
    above = torch.where(states.parents < 0, 0, states.parents - first + 1)
    starts = states.starts.long().numpy()
    places = int(np.diff(starts).max(initial=0)) + 1
    return Order(states.slots.numpy(), starts, above.numpy(), own.numpy(), places, keep=False)


@compiled
def _load(state, dst):
    for i in range(dst.shape[0]):
        for j in range(dst.shape[1]):
            dst[i, j] = to_float(state[i, j])


@compiled
def _store(src, state):
    for i in range(src.shape[0]):
        for j in range(src.shape[1]):
            state[i, j] = from_float(src[i, j], state[i, j])


@compiled
def _softplus(x):
    return x if x > _LINEAR else np.float32(log1p(exp(x)))


@compiled
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)), each of the three rounded to x's type, as vLLM's decoding does."""
    bottom = _ONE + to_float(from_float(np.float32(exp(-to_float(x))), x))
    return to_float(from_float(_ONE / to_float(from_float(bottom, x)), x))


@compiled(fastmath=_FUSED)
def _delta_token(src, dst, like, q, k, v, decay, beta, scale, update, out):
    """Take a head's state src [K, V] to dst by a token with decays [K], and write its output
    [V]."""
    update[:] = _ZERO
    for i in range(len(k)):
        for j in range(len(v)):
            update[j] += src[i, j] * decay[i] * k[i]
    for j in range(len(v)):
        update[j] = (v[j] - update[j]) * beta
    out[:] = _ZERO
    for i in range(len(k)):
        for j in range(len(v)):
            s = src[i, j] * decay[i] + k[i] * update[j]
            out[j] += s * q[i] * scale
            dst[i, j] = to_float(from_float(s, like))


@compiled
def _unit(x, out):
    """Write x, scaled to unit length."""
    total = _ZERO
    for i in range(len(x)):
        out[i] = to_float(x[i])
        total += out[i] * out[i]
    factor = _ONE / np.float32(sqrt(total + _EPSILON))
    for i in range(len(x)):
        out[i] *= factor


@compiled(parallel=True, nogil=True)
def _delta_rule(
    states, slots, starts, above, own, keep, q, k, v, a, b, a_log, dt_bias, out, space, by_channel
):  # fmt: skip
    threads, heads = space.shape[0], v.shape[1]
    group = heads // k.shape[1]
    scale = np.float32(k.shape[2] ** -0.5)
    for thread in numba.prange(threads):
        held = space[thread]
        unit_q, unit_k, decay = np.empty((3, k.shape[2]), np.float32)
        value, update, result = np.empty((3, v.shape[2]), np.float32)
        for task in range(thread, len(slots) * heads, threads):
            r, h = task // heads, task % heads
            state = states[slots[r], h]
            _load(state, held[0])
            for t in range(starts[r], starts[r + 1]):
                _unit(q[t, h // group], unit_q)
                _unit(k[t, h // group], unit_k)
                if by_channel:
                    beta = to_float(b[t, h])
                    for i in range(len(decay)):
                        decay[i] = exp(to_float(a[t, h, i]))
                else:
                    step = _softplus(to_float(a[t, h, 0]) + to_float(dt_bias[h]))
                    decay[:] = np.float32(exp(-np.float32(exp(to_float(a_log[h]))) * step))
                    beta = _sigmoid(b[t, h])
                for j in range(len(value)):
                    value[j] = to_float(v[t, h, j])
                _delta_token(
                    held[above[t]], held[own[t]], state[0, 0], unit_q, unit_k, value, decay, beta,
                    scale, update, result,
                )  # fmt: skip
                for j in range(len(value)):
                    out[t, h, j] = from_float(result[j], out[t, h, j])
            if keep:
                _store(held[0], state)


def gated_delta_rule(
    order: Order,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Run T tokens through a gated delta rule of HV heads.

    Queries and keys are scaled to unit length, queries by K ** -0.5 besides. A token's log decay is
    -exp(a_log) softplus(a + dt_bias), and its beta is sigmoid(b). Without ``a_log`` every channel
    of the keys decays by itself (Kimi Delta Attention, arXiv 2510.26692): ``a`` has the log decays,
    and ``b`` the betas.

    Args:
        order: of the tokens.
        states: [slots, HV, K, V].
        q, k: [T, H, K]; v: [T, HV, V], with HV a multiple of H.
        a, b: [T, HV]; ``a`` [T, HV, K] without ``a_log``.
        a_log, dt_bias: [HV].

    Returns:
        [T, HV, V], of v's type.
    """
    out = torch.empty(v.shape, dtype=v.dtype)
    space = _space(order, states, v.numel() * k.shape[2])
    if a_log is None or dt_bias is None:
        a_log = dt_bias = torch.empty(0)
    read = _dense(q, k, v, a.view(*b.shape, -1), b, a_log, dt_bias)
    _delta_rule(*_places(order, states), *read, as_numpy(out), space, len(a_log) == 0)
    return out


@compiled(fastmath={*_FUSED, "reassoc"})
def _space_token(src, dst, like, truncate, x, b, c, dt, decay, skip, out):
    """Take a head's state src [P, N] to dst by a token, and write its output [P]."""
    for i in range(len(x)):
        total = _ZERO
        for j in range(len(b)):
            s = src[i, j] * decay + b[j] * x[i] * dt
            total += s * c[j]
            dst[i, j] = to_float(from_float(towards_zero(s) if truncate else s, like))
        out[i] = total + x[i] * skip


@compiled(parallel=True, nogil=True)
def _state_space(
    states, slots, starts, above, own, keep, x, dt, a, b, c, d, dt_bias, out, space, truncate
):  # fmt: skip
    threads, heads = space.shape[0], x.shape[1]
    group = heads // b.shape[1]
    for thread in numba.prange(threads):
        held = space[thread]
        value, result = np.empty((2, x.shape[2]), np.float32)
        left, right = np.empty((2, b.shape[2]), np.float32)
        for task in range(thread, len(slots) * heads, threads):
            r, h = task // heads, task % heads
            state = states[slots[r], h]
            _load(state, held[0])
            for t in range(starts[r], starts[r + 1]):
                step = _softplus(to_float(dt[t, h]) + to_float(dt_bias[h]))
                decay = np.float32(exp(to_float(a[h]) * step))
                for j in range(len(value)):
                    value[j] = to_float(x[t, h, j])
                for j in range(len(left)):
                    left[j] = to_float(b[t, h // group, j])
                    right[j] = to_float(c[t, h // group, j])
                _space_token(
                    held[above[t]], held[own[t]], state[0, 0], truncate, value, left, right, step,
                    decay, to_float(d[h]), result,
                )  # fmt: skip
                for j in range(len(value)):
                    out[t, h, j] = from_float(result[j], out[t, h, j])
            if keep:
                _store(held[0], state)


def state_space(
    order: Order,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    truncate: bool = False,
) -> torch.Tensor:
    """Run T tokens through Mamba-2's state space of H heads.

    A token's step is softplus(dt + dt_bias), and its log decay is a times the step.

    Args:
        order: of the tokens.
        states: [slots, H, P, N].
        x: [T, H, P].
        dt: [T, H].
        a, d, dt_bias: [H].
        b, c: [T, G, N], with H a multiple of G.
        truncate: whether states in bfloat16 are rounded towards zero instead of to the nearest.

    Returns:
        [T, H, P], of x's type.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    space = _space(order, states, x.numel() * b.shape[2])
    read = _dense(x, dt, a, b, c, d, dt_bias)
    toward_zero = truncate and states.dtype == torch.bfloat16
    _state_space(*_places(order, states), *read, as_numpy(out), space, toward_zero)
    return out


def _space(order: Order, states: torch.Tensor, elements: int) -> np.ndarray[Any, Any]:
    """Return memory for a request's states of one head, for every thread."""
    threads = use_torch_threads(4 * elements // LANES)
    return np.empty((threads, order.places, *states.shape[2:]), np.float32)


def _places(order: Order, states: torch.Tensor) -> tuple[Any, ...]:
    return as_numpy(states), order.slots, order.starts, order.above, order.own, order.keep


def _dense(*tensors: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    return [as_numpy(each.detach().contiguous()) for each in tensors]
