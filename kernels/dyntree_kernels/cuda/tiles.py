"""Tiles of keys, values and scores, of which tree attention in Triton makes an online softmax."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, offsets, wanted, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """[rows, DP] at base + offsets; zero where not wanted and beyond D."""
    d = tl.arange(0, DP)
    at = base + offsets[:, None] + d[None, :]
    if D != DP:
        return tl.load(at, mask=wanted[:, None] & (d < D)[None, :], other=0.0)
    if MASKED:
        return tl.load(at, mask=wanted[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def without_what_is_not_finite(v):
    """Values with rows of zeros for those that are not all finite, and NaN for each of these rows,
    0 for the others: a weight of zero times what is not finite is not zero."""
    blame = tl.sum(v.to(tl.float32) * 0.0, 1)
    return tl.where((blame == 0.0)[:, None], v, 0.0), blame


@triton.jit
def _capped(s, CAP: tl.constexpr):
    """CAP * tanh(s / CAP), which never divides infinity by infinity."""
    fade = tl.exp2(tl.abs(s) * (-2 * 1.4426950408889634 / CAP))
    return tl.where(s < 0, -CAP, CAP) * ((1 - fade) / (1 + fade))


@triton.jit
def accumulate(
    q, k, v, visible, blame, m, total, acc, scale, MASKED: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """One step of the online softmax in base 2, over the columns of k and v; where MASKED, rows
    that see a column get its ``blame``. CAP: the soft cap in base 2, 0 for none."""
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if CAP > 0:
        s = _capped(s, CAP)
    return fold(s, v.to(q.dtype), visible, blame, m, total, acc, MASKED)


@triton.jit
def accumulate_latent(
    q, q_rotated, v, rotated, visible, blame, m, total, acc, scale, MASKED: tl.constexpr
):  # fmt: skip
    """As `accumulate`, with keys of two parts, the first of which are the values."""
    v = v.to(q.dtype)
    s = tl.dot(q, tl.trans(v), input_precision="ieee")
    s = tl.dot(q_rotated, tl.trans(rotated.to(q.dtype)), s, input_precision="ieee")
    return fold(s * scale, v, visible, blame, m, total, acc, MASKED)


@triton.jit
def fold(s, v, visible, blame, m, total, acc, MASKED: tl.constexpr):
    """The rest of `accumulate`, with scores in base 2 and values in the type of queries."""
    if MASKED:
        s = tl.where(visible, s + blame[None, :], float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing yet keeps -inf, which must not meet itself in a difference.
    shift = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - shift[:, None])
    fade = tl.exp2(m - shift)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new, total * fade + tl.sum(p, 1), acc


@triton.jit
def row_bits(
    BITS, first, node, real, s_bits, words, BM: tl.constexpr
):  # fmt: skip
    """The number of ancestor bits of each row, int32 [BM]."""
    count = tl.zeros([BM], tl.int32)
    for word in range(words):
        at = BITS + (first + node) * s_bits + word
        x = tl.load(at, mask=real, other=0).to(tl.uint32)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        count += ((x * 0x01010101) >> 24).to(tl.int32)
    return count
