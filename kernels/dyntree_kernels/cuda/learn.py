"""Newton steps of the acceptance estimate's logistic regressions in one launch."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.learning import Regression, check_learning

_TILE = 1024  # nodes that are looked at together


@triton.jit
def _seen(
    FEATURES, KINDS, PARENTS, PATH, COUNTS, SLOTS, CLASSES, first, requests, nodes, s_path,
    s_slots, own_class, own_kind, DEPTH: tl.constexpr, RB: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Load a tile of requests of one class: its members, and for their nodes whether they are of
    the kind and were judged, whether they were accepted, and their two features, which are 0 for
    other nodes."""
    request, node = first + tl.arange(0, RB).to(tl.int64), tl.arange(0, NP)
    inside = request < requests
    member = inside & (tl.load(CLASSES + request * s_slots, mask=inside, other=-1) == own_class)
    slot = tl.load(SLOTS + request * s_slots, mask=member, other=0)
    count = tl.load(COUNTS + request, mask=member, other=0)
    real = member[:, None] & (node[None, :] < count[:, None]) & (node < nodes)[None, :]
    at = slot[:, None] * nodes + node[None, :]
    parent = tl.load(PARENTS + at, mask=real, other=-2)
    taken = tl.zeros([RB, NP], tl.int32)
    reached = (parent == -1).to(tl.int32)
    for depth in tl.static_range(DEPTH):
        accepted = tl.load(PATH + request * s_path + depth, mask=member, other=-1)[:, None]
        taken |= (node[None, :] == accepted).to(tl.int32)
        reached |= ((parent == accepted) & (accepted >= 0)).to(tl.int32)
    judged = real & (reached != 0) & (tl.load(KINDS + at, mask=real, other=-1) == own_kind)
    x1 = tl.load(FEATURES + at * 2, mask=judged, other=0.0)
    x2 = tl.load(FEATURES + at * 2 + 1, mask=judged, other=0.0)
    return member, judged.to(tl.float32), taken.to(tl.float32), x1, x2


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _learn(
    WEIGHTS, INFORMATION, FEATURES, KINDS, PARENTS, PATH, COUNTS, SLOTS, CLASSES, PRIOR, LOW, HIGH,
    kinds_each, requests, nodes, s_path, s_slots, strength, memory, STEPS: tl.constexpr,
    DEPTH: tl.constexpr, RB: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    own_class, own_kind = own // kinds_each, own % kinds_each
    seen = 0.0
    for first in range(0, requests, RB):
        member, judged, taken, x1, x2 = _seen(
            FEATURES, KINDS, PARENTS, PATH, COUNTS, SLOTS, CLASSES, first, requests, nodes, s_path,
            s_slots, own_class, own_kind, DEPTH, RB, NP,
        )  # fmt: skip
        each = tl.maximum(tl.sum(judged, 1), 1.0)
        seen += tl.sum(tl.where(member, each, 0.0), 0)
    kept = tl.exp(-seen / memory)
    back = (1 - kept) * strength
    info = INFORMATION + own * 9
    k00 = kept * tl.load(info)
    k01 = kept * tl.load(info + 1)
    k02 = kept * tl.load(info + 2)
    k11 = kept * tl.load(info + 4)
    k12 = kept * tl.load(info + 5)
    k22 = kept * tl.load(info + 8)
    prior = PRIOR + own_kind * 3
    p0, p1, p2 = tl.load(prior), tl.load(prior + 1), tl.load(prior + 2)
    old = WEIGHTS + own * 3
    o0, o1, o2 = tl.load(old), tl.load(old + 1), tl.load(old + 2)
    w0, w1, w2 = o0, o1, o2
    a00, a01, a02, a11, a12, a22 = k00 + back, k01, k02, k11 + back, k12, k22 + back
    for _step in tl.static_range(STEPS):
        d0, d1, d2 = o0 - w0, o1 - w1, o2 - w2
        g0 = k00 * d0 + k01 * d1 + k02 * d2 + back * (p0 - w0)
        g1 = k01 * d0 + k11 * d1 + k12 * d2 + back * (p1 - w1)
        g2 = k02 * d0 + k12 * d1 + k22 * d2 + back * (p2 - w2)
        a00, a01, a02, a11, a12, a22 = k00 + back, k01, k02, k11 + back, k12, k22 + back
        for first in range(0, requests, RB):
            member, judged, taken, x1, x2 = _seen(
                FEATURES, KINDS, PARENTS, PATH, COUNTS, SLOTS, CLASSES, first, requests, nodes,
                s_path, s_slots, own_class, own_kind, DEPTH, RB, NP,
            )  # fmt: skip
            chance = tl.sigmoid(w0 + w1 * x1 + w2 * x2)
            surprise = (taken - chance) * judged
            g0 += _sum(surprise)
            g1 += _sum(surprise * x1)
            g2 += _sum(surprise * x2)
            curve = chance * (1 - chance) * judged
            a00 += _sum(curve)
            a01 += _sum(curve * x1)
            a02 += _sum(curve * x2)
            a11 += _sum(curve * x1 * x1)
            a12 += _sum(curve * x1 * x2)
            a22 += _sum(curve * x2 * x2)
        # Cramer's rule, in double precision as it loses the square of the condition number.
        b00, b01, b02 = a00.to(tl.float64), a01.to(tl.float64), a02.to(tl.float64)
        b11, b12, b22 = a11.to(tl.float64), a12.to(tl.float64), a22.to(tl.float64)
        c00, c01, c02 = b11 * b22 - b12 * b12, b02 * b12 - b01 * b22, b01 * b12 - b02 * b11
        c11, c12, c22 = b00 * b22 - b02 * b02, b01 * b02 - b00 * b12, b00 * b11 - b01 * b01
        scale = 1 / (b00 * c00 + b01 * c01 + b02 * c02)
        w0 += ((c00 * g0 + c01 * g1 + c02 * g2) * scale).to(tl.float32)
        w1 += ((c01 * g0 + c11 * g1 + c12 * g2) * scale).to(tl.float32)
        w2 += ((c02 * g0 + c12 * g1 + c22 * g2) * scale).to(tl.float32)
        w0 = _between(w0, LOW, HIGH)
        w1 = _between(w1, LOW + 1, HIGH + 1)
        w2 = _between(w2, LOW + 2, HIGH + 2)
    sound = tl.abs(w0 + w1 + w2 + a00 + a01 + a02 + a11 + a12 + a22) < float("inf")
    tl.store(old, tl.where(sound, w0, p0))
    tl.store(old + 1, tl.where(sound, w1, p1))
    tl.store(old + 2, tl.where(sound, w2, p2))
    tl.store(info, tl.where(sound, a00, strength))
    tl.store(info + 1, tl.where(sound, a01, 0.0))
    tl.store(info + 2, tl.where(sound, a02, 0.0))
    tl.store(info + 3, tl.where(sound, a01, 0.0))
    tl.store(info + 4, tl.where(sound, a11, strength))
    tl.store(info + 5, tl.where(sound, a12, 0.0))
    tl.store(info + 6, tl.where(sound, a02, 0.0))
    tl.store(info + 7, tl.where(sound, a12, 0.0))
    tl.store(info + 8, tl.where(sound, a22, strength))


@triton.jit
def _between(x, LOW, HIGH):
    """Clamp, but keep NaN, which is checked later."""
    low, high = tl.load(LOW), tl.load(HIGH)
    return tl.where(x < low, low, tl.where(x > high, high, x))


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
    """Learn as in `Learn`. ``slots`` and ``classes`` may be columns of one array.

    Raises:
        ValueError: as in `Learn`, and if the strides of these two differ.
    """
    check_learning(regression, features, kinds, parents, path, counts)
    if slots.stride() != classes.stride():
        raise ValueError(
            f"slots {slots.stride()} and classes {classes.stride()} must be laid out alike"
        )
    requests, nodes = slots.shape[0], parents.shape[1]
    if not requests:
        return
    lanes = triton.next_power_of_2(nodes)
    tile = max(1, min(triton.next_power_of_2(requests), _TILE // lanes))
    _learn[(regression.weights.shape[0],)](
        regression.weights, regression.information, features, kinds, parents, path, counts, slots,
        classes, regression.prior, regression.low, regression.high,
        regression.prior.shape[0], requests, nodes, path.stride(0), slots.stride(0),
        regression.strength, regression.memory, STEPS=regression.steps, DEPTH=path.shape[1],
        RB=tile, NP=lanes, num_warps=4,
    )  # fmt: skip
