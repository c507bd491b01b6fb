"""The gated delta rule, Mamba-2's state space and convolutions over trees of tokens, in Triton.

A tree passes a layer as one chunk whose causal mask is the ancestor mask, in float32
(`tests/reference/recurrence.py` has the formulas and their sources). States are read and not
written: `state_commits` advances them.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LINEAR = tl.constexpr(20.0)
"""Above it, softplus is the identity, as in vLLM's kernels."""
EPSILON = tl.constexpr(1e-6)
"""Of the queries' and keys' length, as in vLLM's kernels."""
_BK = 16  # a step of the products over states; fp32 products of longer ones spill registers
CHANNELS = 128
"""Channels of a convolution for one program."""


class RecurrentRows(NamedTuple):
    """What recurrent layers read of R requests with T rows, all on the layers' device.

    ``slots`` int64 [R]: the requests' states. ``starts`` int32 [R + 1]: request r has the rows
    starts[r] : starts[r + 1]. ``ctx_lens`` int32 [R]: -1 marks a request without a tree, whose rows
    are a chain. ``ancestor_bits`` int32 [T, words], with dense words: bit c of a row is set if its
    request's row c is the row or an ancestor of it. ``most``: no request has more rows.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    ctx_lens: torch.Tensor
    ancestor_bits: torch.Tensor
    most: int

    @property
    def nodes(self) -> int:
        """The rows of a tile: a power of two from 16 on."""
        least: int = triton.next_power_of_2(self.most)
        return max(16, least)


@triton.jit
def softplus(x):
    return tl.where(x > LINEAR, x, tl.log(1.0 + tl.exp(tl.minimum(x, LINEAR))))


@triton.jit
def _seen(BITS, CTX, request, first, rows, s_bits, NODES: tl.constexpr):
    """Whether a request's row i is row j or below it, [NODES, NODES]; never for i or j >= rows."""
    i = tl.arange(0, NODES)[:, None]
    j = tl.arange(0, NODES)[None, :]
    real = (i < rows) & (j < rows)
    word = tl.load(BITS + (first + i) * s_bits + j // 32, mask=real, other=0)
    bit = ((word >> (j & 31)) & 1) != 0
    return tl.where(tl.load(CTX + request) < 0, j <= i, bit) & real


@triton.jit
def _matrix(P, rows, columns, s_row, real_rows, real_columns):
    """Load elements as float32, zero where a row or a column is not real."""
    mask = real_rows[:, None] & real_columns[None, :]
    return tl.load(P + rows[:, None] * s_row + columns[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def _decays(seen, logs):
    """Sums of log decays from the root to each row, and factors from row j to row i."""
    sums = tl.sum(tl.where(seen, logs[None, :], 0.0), 1)
    # An ancestor's sum is the larger one. Other pairs are masked; the bound keeps them finite.
    return sums, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))


@triton.jit
def _space_trees(
    X, STEP, B, C, STATES, OUT, A, SKIP, BIAS, SLOTS, STARTS, CTX, BITS, sx_t, sd_t, sb_t, sc_t,
    so_t, s_slot, s_head, s_bits, GROUP: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    NODES: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(STARTS + request).to(tl.int64)
    rows = (tl.load(STARTS + request + 1) - first).to(tl.int32)
    if rows == 0:
        return
    row = tl.arange(0, NODES)
    real, at = row < rows, first + row
    seen = _seen(BITS, CTX, request, first, rows, s_bits, NODES)
    step = tl.load(STEP + at * sd_t + head, mask=real, other=0).to(tl.float32)
    step = tl.where(real, softplus(step + tl.load(BIAS + head).to(tl.float32)), 0.0)
    sums, between = _decays(seen, step * tl.load(A + head).to(tl.float32))
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    states = STATES + tl.load(SLOTS + request) * s_slot + head * s_head
    scores = tl.zeros([NODES, NODES], tl.float32)
    out = tl.zeros([NODES, BP], tl.float32)
    for start in range(0, WIDTH, BK):
        k = start + tl.arange(0, BK)
        c = _matrix(C + head // GROUP * WIDTH, at, k, sc_t, real, k < WIDTH)
        b = _matrix(B + head // GROUP * WIDTH, at, k, sb_t, real, k < WIDTH)
        state = _matrix(states, p, k, WIDTH, p < P, k < WIDTH)
        scores = tl.dot(c, tl.trans(b), scores, input_precision="ieee")
        out = tl.dot(c, tl.trans(state), out, input_precision="ieee")
    x = _matrix(X + head * P, at, p, sx_t, real, p < P)
    weights = tl.where(seen, scores * between * step[None, :], 0.0)
    out = tl.dot(weights, x, out * tl.exp(sums)[:, None], input_precision="ieee")
    out += x * tl.load(SKIP + head).to(tl.float32)
    place = OUT + at[:, None] * so_t + head * P + p[None, :]
    tl.store(place, out.to(OUT.dtype.element_ty), mask=real[:, None] & (p < P)[None, :])


def state_space(
    trees: RecurrentRows,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run T rows through Mamba-2's state space of H heads.

    A row's step is softplus(dt + dt_bias), and its log decay is a times the step.

    Args:
        trees: of the rows.
        states: [slots, H, P, N], dense within a head.
        x, out: [T, H, P]; b, c: [T, G, N], with H a multiple of G; dense within a row.
        dt: [T, H], dense within a row.
        a, d, dt_bias: [H].
    """
    (_, heads, size), width = x.shape, b.shape[2]
    block = 32
    grid = len(trees.slots), heads, triton.cdiv(size, block)
    _space_trees[grid](
        x, dt, b, c, states, out, a, d, dt_bias, *trees[:4], x.stride(0), dt.stride(0),
        b.stride(0), c.stride(0), out.stride(0), *states.stride()[:2],
        trees.ancestor_bits.stride(0), GROUP=heads // b.shape[1], P=size, WIDTH=width,
        NODES=trees.nodes, BP=block, BK=_BK, num_warps=4 if trees.nodes <= 32 else 8,
    )  # fmt: skip


@triton.jit
def _solve(system, u, rows, NODES: tl.constexpr):
    """Solve (1 + system) x = u for a strictly lower triangular system, row by row.

    A product of the system's powers would lose keys that are alike.
    """
    row = tl.arange(0, NODES)
    for t in range(1, rows):
        factors = tl.sum(tl.where((row == t)[:, None], system, 0.0), 0)
        above = tl.sum(factors[:, None] * u, 0)
        u = tl.where((row == t)[:, None], u - above[None, :], u)
    return u


@triton.jit
def _products(
    queries, keys, states, at, real, j, sq_t, sk_t, s_k, s_v, KEYS: tl.constexpr,
    VALUES: tl.constexpr, NODES: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Products of queries and of keys with keys [NODES, NODES] and with the state [NODES, BV], and
    of each with itself [NODES]."""
    scores = tl.zeros([NODES, NODES], tl.float32)
    system = tl.zeros([NODES, NODES], tl.float32)
    out = tl.zeros([NODES, BV], tl.float32)
    u = tl.zeros([NODES, BV], tl.float32)
    q_length = tl.zeros([NODES], tl.float32)
    k_length = tl.zeros([NODES], tl.float32)
    for start in range(0, KEYS, BK):
        i = start + tl.arange(0, BK)
        q = _matrix(queries, at, i, sq_t, real, i < KEYS)
        k = _matrix(keys, at, i, sk_t, real, i < KEYS)
        inside = (i < KEYS)[:, None] & (j < VALUES)[None, :]
        state = tl.load(states + i[:, None] * s_k + j[None, :] * s_v, mask=inside, other=0)
        state = state.to(tl.float32)
        q_length += tl.sum(q * q, 1)
        k_length += tl.sum(k * k, 1)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        system = tl.dot(k, tl.trans(k), system, input_precision="ieee")
        out = tl.dot(q, state, out, input_precision="ieee")
        u = tl.dot(k, state, u, input_precision="ieee")
    return scores, system, out, u, q_length, k_length


@triton.jit
def _decayed_products(
    queries, keys, logs, states, at, real, seen, j, sq_t, sk_t, sg_t, s_k, s_v, KEYS: tl.constexpr,
    VALUES: tl.constexpr, NODES: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """As `_products`, each channel with decays of its own: those of products with keys from the
    key's row on, and those of products with the state from the root on.

    Factors of the rows alone would overflow, so there is one for each pair.
    """
    scores = tl.zeros([NODES, NODES], tl.float32)
    system = tl.zeros([NODES, NODES], tl.float32)
    out = tl.zeros([NODES, BV], tl.float32)
    u = tl.zeros([NODES, BV], tl.float32)
    q_length = tl.zeros([NODES], tl.float32)
    k_length = tl.zeros([NODES], tl.float32)
    for i in range(KEYS):
        q = tl.load(queries + at * sq_t + i, mask=real, other=0).to(tl.float32)
        k = tl.load(keys + at * sk_t + i, mask=real, other=0).to(tl.float32)
        log = tl.load(logs + at * sg_t + i, mask=real, other=0).to(tl.float32)
        state = tl.load(states + i * s_k + j * s_v, mask=j < VALUES, other=0).to(tl.float32)
        sums, between = _decays(seen, log)
        kept = tl.exp(sums)
        q_length += q * q
        k_length += k * k
        decayed = between * k[None, :]
        scores += q[:, None] * decayed
        system += k[:, None] * decayed
        out += (q * kept)[:, None] * state[None, :]
        u += (k * kept)[:, None] * state[None, :]
    return scores, system, out, u, q_length, k_length


@triton.jit
def _delta_trees(
    Q, K, V, GATE, BETA, STATES, OUT, LOGS, BIAS, SLOTS, STARTS, CTX, BITS, scale, sq_t, sk_t, sv_t,
    sg_t, sb_t, so_t, s_slot, s_head, s_k, s_v, s_bits, GROUP: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, NODES: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(STARTS + request).to(tl.int64)
    rows = (tl.load(STARTS + request + 1) - first).to(tl.int32)
    if rows == 0:
        return
    row = tl.arange(0, NODES)
    real, at = row < rows, first + row
    seen = _seen(BITS, CTX, request, first, rows, s_bits, NODES)
    beta = tl.load(BETA + at * sb_t + head, mask=real, other=0).to(tl.float32)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    queries, keys = Q + head // GROUP * KEYS, K + head // GROUP * KEYS
    states = STATES + tl.load(SLOTS + request) * s_slot + head * s_head
    if LOGS is None:
        scores, system, out, u, q_length, k_length = _decayed_products(
            queries, keys, GATE + head * KEYS, states, at, real, seen, j, sq_t, sk_t, sg_t, s_k,
            s_v, KEYS, VALUES, NODES, BV,
        )  # fmt: skip
        kept = tl.full([NODES], 1.0, tl.float32)
    else:
        gate = tl.load(GATE + at * sg_t + head, mask=real, other=0).to(tl.float32)
        log = -tl.exp(tl.load(LOGS + head).to(tl.float32))
        log = log * softplus(gate + tl.load(BIAS + head).to(tl.float32))
        sums, between = _decays(seen, tl.where(real, log, 0.0))
        beta = tl.sigmoid(beta)
        scores, system, out, u, q_length, k_length = _products(
            queries, keys, states, at, real, j, sq_t, sk_t, s_k, s_v, KEYS, VALUES, NODES, BK, BV
        )
        scores, system, kept = scores * between, system * between, tl.exp(sums)
    q_factor = scale / tl.sqrt(q_length + EPSILON)
    k_factor = 1.0 / tl.sqrt(k_length + EPSILON)
    scores = tl.where(seen, scores * q_factor[:, None] * k_factor[None, :], 0.0)
    system = system * (k_factor * beta)[:, None] * k_factor[None, :]
    system = tl.where(seen & (row[:, None] != row[None, :]), system, 0.0)
    v = _matrix(V + head * VALUES, at, j, sv_t, real, j < VALUES)
    u = (v - u * (k_factor * kept)[:, None]) * beta[:, None]
    u = _solve(system, u, rows, NODES)
    out = out * (q_factor * kept)[:, None]
    if LOGS is None:  # With these scores, a product of matrices spills registers.
        for t in range(rows):
            of_t = tl.sum(tl.where((row == t)[None, :], scores, 0.0), 1)
            out += of_t[:, None] * tl.sum(tl.where((row == t)[:, None], u, 0.0), 0)[None, :]
    else:
        out = tl.dot(scores, u, out, input_precision="ieee")
    place = OUT + at[:, None] * so_t + head * VALUES + j[None, :]
    tl.store(place, out.to(OUT.dtype.element_ty), mask=real[:, None] & (j < VALUES)[None, :])


def gated_delta_rule(
    trees: RecurrentRows,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Run T rows through a gated delta rule of HV heads.

    Queries and keys are scaled to unit length, queries by K ** -0.5 besides. A row's log decay is
    -exp(a_log) softplus(a + dt_bias), and its beta is sigmoid(b). Without ``a_log`` every channel
    of the keys decays by itself (Kimi Delta Attention, arXiv 2510.26692): ``a`` has the log decays,
    and ``b`` the betas.

    Args:
        trees: of the rows.
        states: [slots, HV, K, V].
        q, k: [T, H, K]; v, out: [T, HV, V], with HV a multiple of H; dense within a row.
        a, b: [T, HV], dense within a row; ``a`` [T, HV, K] without ``a_log``.
        a_log, dt_bias: [HV].
    """
    (_, heads, size), keys = v.shape, q.shape[2]
    block = 32
    grid = len(trees.slots), heads, triton.cdiv(size, block)
    _delta_trees[grid](
        q, k, v, a, b, states, out, a_log, dt_bias, *trees[:4], keys**-0.5, q.stride(0),
        k.stride(0), v.stride(0), a.stride(0), b.stride(0), out.stride(0), *states.stride(),
        trees.ancestor_bits.stride(0), GROUP=heads // q.shape[1], KEYS=keys, VALUES=size,
        NODES=trees.nodes, BK=_BK, BV=block,
        num_warps=4 if trees.nodes <= 32 else 8,
    )  # fmt: skip


@triton.jit
def _convolve_trees(
    RAW, HISTORY, WEIGHT, BIAS, OUT, KEPT, SLOTS, STARTS, CTX, BITS, channels, sr_t, so_t, sk_t,
    s_slot, s_entry, s_channel, s_weight, s_bits, WIDTH: tl.constexpr, NODES: tl.constexpr,
    BC: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    request, row = tl.program_id(0), tl.program_id(1)
    first = tl.load(STARTS + request).to(tl.int64)
    if row >= tl.load(STARTS + request + 1) - first:
        return
    column = tl.arange(0, NODES)
    word = tl.load(BITS + (first + row) * s_bits + column // 32, mask=column <= row, other=0)
    bit = tl.where(tl.load(CTX + request) < 0, 1, (word >> (column & 31)) & 1)
    bit = tl.where(column <= row, bit, 0)
    length = tl.sum(bit, 0)
    below = length - tl.cumsum(bit, 0)  # for an ancestor, the number of those below it
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    real = c < channels
    total = tl.zeros([BC], tl.float32)
    if BIAS is not None:
        total += tl.load(BIAS + c, mask=real, other=0).to(tl.float32)
    history = HISTORY + tl.load(SLOTS + request) * s_slot + c * s_channel
    for tap in tl.static_range(WIDTH):
        above = WIDTH - 1 - tap
        ancestor = tl.sum(tl.where((bit != 0) & (below == above), column, 0), 0)
        of_tree = (tl.zeros([BC], tl.int32) + length) > above
        x = tl.load(RAW + (first + ancestor) * sr_t + c, mask=real & of_tree, other=0)
        if above == 0 and KEPT is not None:
            tl.store(KEPT + (first + row) * sk_t + c, x, mask=real)
        entry = tl.maximum(tap + length - 1, 0)
        before = tl.load(history + entry * s_entry, mask=real & ~of_tree, other=0)
        weight = tl.load(WEIGHT + c * s_weight + tap, mask=real, other=0)
        total += (x.to(tl.float32) + before.to(tl.float32)) * weight.to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(OUT + (first + row) * so_t + c, total.to(OUT.dtype.element_ty), mask=real)


def convolve(
    trees: RecurrentRows,
    history: torch.Tensor,
    raw: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """Convolve each row with its nearest ancestors, and with the history above the root.

    Args:
        trees: of the rows.
        history: [slots, W - 1, C], the last inputs before the root, the latest one last.
        raw, out: [T, C], dense within a row.
        weight: [C, W], dense within a channel; bias: [C].
        silu: whether a SiLU follows.
        kept: as ``out``; the rows of ``raw`` are copied there.
    """
    (channels, width) = weight.shape
    grid = len(trees.slots), trees.most, triton.cdiv(channels, CHANNELS)
    _convolve_trees[grid](
        raw, history, weight, bias, out, kept, *trees[:4], channels, raw.stride(0), out.stride(0),
        0 if kept is None else kept.stride(0), *history.stride(), weight.stride(0),
        trees.ancestor_bits.stride(0), WIDTH=width, NODES=trees.nodes, BC=CHANNELS, SILU=silu,
        num_warps=4,
    )  # fmt: skip
