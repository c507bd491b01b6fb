"""Advances the states of recurrent layers along accepted paths, in Triton.

A commit is the recurrence itself over the accepted rows, whose inputs are those of the forward of
the trees (`dyntree_kernels.cuda.recurrence`). All paths of a layer are advanced by one launch. It
also stores the states where blocks of the KV cache end.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.cuda.recurrence import CHANNELS, EPSILON, softplus
from dyntree_kernels.recurrence import Commit


@triton.jit
def _space_commit(
    X, STEP, B, STATES, A, BIAS, SLOTS, PATH, COUNTS, ENDS, END_SLOTS, sx_t, sd_t, sb_t, s_slot,
    s_head, s_path, GROUP: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, BP: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(COUNTS + request)
    if length == 0:
        return
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    k = tl.arange(0, BK)
    inside = (p < P)[:, None] & (k < WIDTH)[None, :]
    within = head * s_head + p[:, None] * WIDTH + k[None, :]
    places = STATES + tl.load(SLOTS + request) * s_slot + within
    end, end_slot = tl.load(ENDS + request), tl.load(END_SLOTS + request)
    state = tl.load(places, mask=inside, other=0).to(tl.float32)
    a, bias = tl.load(A + head).to(tl.float32), tl.load(BIAS + head).to(tl.float32)
    for depth in range(length):
        row = tl.load(PATH + request * s_path + depth)
        step = softplus(tl.load(STEP + row * sd_t + head).to(tl.float32) + bias)
        x = tl.load(X + row * sx_t + head * P + p, mask=p < P, other=0).to(tl.float32)
        b = tl.load(B + row * sb_t + head // GROUP * WIDTH + k, mask=k < WIDTH, other=0)
        state = state * tl.exp(a * step) + (x * step)[:, None] * b.to(tl.float32)[None, :]
        stored = state.to(STATES.dtype.element_ty)
        state = stored.to(tl.float32)  # as plain decoding rounds it
        if depth + 1 == end:
            tl.store(STATES + end_slot * s_slot + within, stored, mask=inside)
    tl.store(places, state.to(STATES.dtype.element_ty), mask=inside)


def advance_state_space(
    accepted: Commit,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> None:
    """Advance the ``states`` of Mamba-2 along accepted paths; arguments as of `state_space`."""
    (_, heads, size), width = x.shape, b.shape[2]
    block = min(32, triton.next_power_of_2(size))
    grid = len(accepted.slots), heads, triton.cdiv(size, block)
    _space_commit[grid](
        x, dt, b, states, a, dt_bias, *accepted,
        x.stride(0), dt.stride(0), b.stride(0), *states.stride()[:2], accepted.paths.stride(0),
        GROUP=heads // b.shape[1], P=size, WIDTH=width, BP=block, BK=triton.next_power_of_2(width),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _delta_commit(
    K, V, GATE, BETA, STATES, LOGS, BIAS, SLOTS, PATH, COUNTS, ENDS, END_SLOTS, sk_t, sv_t, sg_t,
    sb_t, s_slot, s_head, s_k, s_v, s_path, GROUP: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(COUNTS + request)
    if length == 0:
        return
    i = tl.arange(0, BK)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (i < KEYS)[:, None] & (j < VALUES)[None, :]
    within = head * s_head + i[:, None] * s_k + j[None, :] * s_v
    places = STATES + tl.load(SLOTS + request) * s_slot + within
    end, end_slot = tl.load(ENDS + request), tl.load(END_SLOTS + request)
    state = tl.load(places, mask=inside, other=0).to(tl.float32)
    log, bias = tl.load(LOGS + head).to(tl.float32), tl.load(BIAS + head).to(tl.float32)
    for depth in range(length):
        row = tl.load(PATH + request * s_path + depth)
        gate = tl.load(GATE + row * sg_t + head).to(tl.float32)
        beta = tl.sigmoid(tl.load(BETA + row * sb_t + head).to(tl.float32))
        k = tl.load(K + row * sk_t + head // GROUP * KEYS + i, mask=i < KEYS, other=0)
        k = k.to(tl.float32)
        k = k / tl.sqrt(tl.sum(k * k, 0) + EPSILON)
        v = tl.load(V + row * sv_t + head * VALUES + j, mask=j < VALUES, other=0).to(tl.float32)
        state = state * tl.exp(-tl.exp(log) * softplus(gate + bias))
        u = (v - tl.sum(state * k[:, None], 0)) * beta
        state = state + k[:, None] * u[None, :]
        stored = state.to(STATES.dtype.element_ty)
        state = stored.to(tl.float32)  # as plain decoding rounds it
        if depth + 1 == end:
            tl.store(STATES + end_slot * s_slot + within, stored, mask=inside)
    tl.store(places, state.to(STATES.dtype.element_ty), mask=inside)


def advance_delta_rule(
    accepted: Commit,
    states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> None:
    """Advance ``states`` along accepted paths; arguments as of `gated_delta_rule`."""
    (_, heads, size), keys = v.shape, k.shape[2]
    block = 32
    grid = len(accepted.slots), heads, triton.cdiv(size, block)
    _delta_commit[grid](
        k, v, a, b, states, a_log, dt_bias, *accepted,
        k.stride(0), v.stride(0), a.stride(0), b.stride(0), *states.stride(),
        accepted.paths.stride(0), GROUP=heads // k.shape[1], KEYS=keys, VALUES=size,
        BK=triton.next_power_of_2(keys), BV=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _inputs_until(
    RAW, history, path, depth, entry, c, inside, sr_t, s_entry, ENTRIES: tl.constexpr
):  # fmt: skip
    """The last inputs [entries, channels] after ``depth`` rows of a path."""
    at = depth + entry - ENTRIES  # on the path, or negative for what is kept of the history
    of_path = (at >= 0) & (entry < ENTRIES)
    row = tl.load(path + at, mask=of_path, other=0)
    x = tl.load(RAW + row[:, None] * sr_t + c[None, :], mask=inside & of_path[:, None], other=0)
    kept = tl.load(
        history + (entry + depth)[:, None] * s_entry, mask=inside & ~of_path[:, None], other=0
    )
    return tl.where(of_path[:, None], x.to(kept.dtype), kept)


@triton.jit
def _keep_history(
    RAW, HISTORY, SLOTS, PATH, COUNTS, ENDS, END_SLOTS, channels, sr_t, s_slot, s_entry, s_channel,
    s_path, ENTRIES: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    length = tl.load(COUNTS + request)
    if length == 0:
        return
    entry = tl.arange(0, BE)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (entry < ENTRIES)[:, None] & (c < channels)[None, :]
    history = HISTORY + tl.load(SLOTS + request) * s_slot + c[None, :] * s_channel
    path, end = PATH + request * s_path, tl.load(ENDS + request)
    if (end > 0) & (end <= length):
        found = _inputs_until(RAW, history, path, end, entry, c, inside, sr_t, s_entry, ENTRIES)
        other = HISTORY + tl.load(END_SLOTS + request) * s_slot + c[None, :] * s_channel
        tl.store(other + entry[:, None] * s_entry, found, mask=inside)
    found = _inputs_until(RAW, history, path, length, entry, c, inside, sr_t, s_entry, ENTRIES)
    # A program has all entries of its channels: nothing is overwritten before it is read.
    tl.debug_barrier()
    tl.store(history + entry[:, None] * s_entry, found, mask=inside)


def keep_history(accepted: Commit, history: torch.Tensor, raw: torch.Tensor) -> None:
    """Let histories of convolutions end with the inputs of accepted paths.

    Args:
        accepted: the paths.
        history: [slots, W - 1, C], the latest input last.
        raw: [T, C], dense within a row.
    """
    _, entries, channels = history.shape
    grid = len(accepted.slots), triton.cdiv(channels, CHANNELS)
    _keep_history[grid](
        raw, history, *accepted, channels, raw.stride(0),
        *history.stride(), accepted.paths.stride(0), ENTRIES=entries,
        BE=triton.next_power_of_2(entries), BC=CHANNELS, num_warps=4,
    )  # fmt: skip
