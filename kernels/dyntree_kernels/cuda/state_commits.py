"""Advances the states of recurrent layers along accepted paths, in Triton.

A commit is the recurrence itself over the accepted rows, whose inputs are those of the forward of
the trees (`dyntree_kernels.cuda.recurrence`). One launch advances all paths in all layers of one
shape. It also stores the states where blocks of the KV cache end.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dyntree_kernels.cuda.recurrence import CHANNELS, EPSILON, softplus
from dyntree_kernels.recurrence import Commit


class Layers(NamedTuple):
    """Tensors of layers whose tensors have the same shapes, strides and types.

    ``first``: those of the first layer. ``addresses`` int64 [tensors, layers]. ``aligned``: bytes
    that divide every address.
    """

    first: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    aligned: int

    @classmethod
    def of(cls, layers: Sequence[tuple[torch.Tensor, ...]]) -> Layers:
        """Note where the tensors of each layer are. They must stay there.

        Raises:
            ValueError: if layers differ in shapes, strides or types.
        """
        kinds = {tuple((each.shape, each.stride(), each.dtype) for each in of) for of in layers}
        if len(kinds) > 1:
            raise ValueError(f"the layers of one launch have one shape, not {len(kinds)}")
        found = [[each.data_ptr() for each in tensors] for tensors in zip(*layers, strict=True)]
        aligned = math.gcd(16, *(address for of_tensor in found for address in of_tensor))
        return cls(layers[0], torch.tensor(found, device=layers[0][0].device), aligned)


@triton.jit
def _of_layer(FIRST, ADDRESSES, tensor, layer, layers, ALIGNED: tl.constexpr):
    """The address of a layer's tensor, of the type of the first layer's."""
    address = tl.load(ADDRESSES + tensor * layers + layer).to(FIRST.dtype)
    return tl.multiple_of(address, ALIGNED)


@triton.jit
def _space_commit(
    X, STEP, B, STATES, A, BIAS, ADDRESSES, SLOTS, PATH, COUNTS, ENDS, END_SLOTS, heads, layers,
    sx_t, sd_t, sb_t, s_slot, s_head, s_path, ALIGNED: tl.constexpr, GROUP: tl.constexpr,
    P: tl.constexpr, WIDTH: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    request, head, layer = tl.program_id(0), tl.program_id(1) % heads, tl.program_id(1) // heads
    length = tl.load(COUNTS + request)
    if length == 0:
        return
    x_of = _of_layer(X, ADDRESSES, 0, layer, layers, ALIGNED)
    step_of = _of_layer(STEP, ADDRESSES, 1, layer, layers, ALIGNED)
    b_of = _of_layer(B, ADDRESSES, 2, layer, layers, ALIGNED)
    states = _of_layer(STATES, ADDRESSES, 3, layer, layers, ALIGNED)
    a_of = _of_layer(A, ADDRESSES, 4, layer, layers, ALIGNED)
    bias_of = _of_layer(BIAS, ADDRESSES, 5, layer, layers, ALIGNED)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    k = tl.arange(0, BK)
    inside = (p < P)[:, None] & (k < WIDTH)[None, :]
    within = head * s_head + p[:, None] * WIDTH + k[None, :]
    places = states + tl.load(SLOTS + request) * s_slot + within
    end, end_slot = tl.load(ENDS + request), tl.load(END_SLOTS + request)
    state = tl.load(places, mask=inside, other=0).to(tl.float32)
    a, bias = tl.load(a_of + head).to(tl.float32), tl.load(bias_of + head).to(tl.float32)
    for depth in range(length):
        row = tl.load(PATH + request * s_path + depth)
        step = softplus(tl.load(step_of + row * sd_t + head).to(tl.float32) + bias)
        x = tl.load(x_of + row * sx_t + head * P + p, mask=p < P, other=0).to(tl.float32)
        b = tl.load(b_of + row * sb_t + head // GROUP * WIDTH + k, mask=k < WIDTH, other=0)
        state = state * tl.exp(a * step) + (x * step)[:, None] * b.to(tl.float32)[None, :]
        stored = state.to(STATES.dtype.element_ty)
        state = stored.to(tl.float32)  # as plain decoding rounds it
        if depth + 1 == end:
            tl.store(states + end_slot * s_slot + within, stored, mask=inside)
    tl.store(places, state.to(STATES.dtype.element_ty), mask=inside)


def advance_state_space(accepted: Commit, layers: Layers) -> None:
    """Advance states of Mamba-2 along accepted paths.

    ``layers``: their x, dt, b, states, a and dt_bias, as `state_space` takes them.
    """
    x, dt, b, states, *_ = layers.first
    (_, heads, size), width, count = x.shape, b.shape[2], layers.addresses.shape[1]
    block = min(32, triton.next_power_of_2(size))
    grid = len(accepted.slots), heads * count, triton.cdiv(size, block)
    _space_commit[grid](
        *layers.first, layers.addresses, *accepted, heads, count,
        x.stride(0), dt.stride(0), b.stride(0), *states.stride()[:2], accepted.paths.stride(0),
        ALIGNED=layers.aligned, GROUP=heads // b.shape[1], P=size, WIDTH=width, BP=block,
        BK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


@triton.jit
def _delta_commit(
    K, V, GATE, BETA, STATES, LOGS, BIAS, ADDRESSES, SLOTS, PATH, COUNTS, ENDS, END_SLOTS, heads,
    layers, sk_t, sv_t, sg_t, sb_t, s_slot, s_head, s_k, s_v, s_path, ALIGNED: tl.constexpr,
    GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    request, head, layer = tl.program_id(0), tl.program_id(1) % heads, tl.program_id(1) // heads
    length = tl.load(COUNTS + request)
    if length == 0:
        return
    k_of = _of_layer(K, ADDRESSES, 0, layer, layers, ALIGNED)
    v_of = _of_layer(V, ADDRESSES, 1, layer, layers, ALIGNED)
    gate_of = _of_layer(GATE, ADDRESSES, 2, layer, layers, ALIGNED)
    beta_of = _of_layer(BETA, ADDRESSES, 3, layer, layers, ALIGNED)
    states = _of_layer(STATES, ADDRESSES, 4, layer, layers, ALIGNED)
    i = tl.arange(0, BK)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (i < KEYS)[:, None] & (j < VALUES)[None, :]
    within = head * s_head + i[:, None] * s_k + j[None, :] * s_v
    places = states + tl.load(SLOTS + request) * s_slot + within
    end, end_slot = tl.load(ENDS + request), tl.load(END_SLOTS + request)
    state = tl.load(places, mask=inside, other=0).to(tl.float32)
    if LOGS is not None:
        log = tl.load(_of_layer(LOGS, ADDRESSES, 5, layer, layers, ALIGNED) + head).to(tl.float32)
        bias = tl.load(_of_layer(BIAS, ADDRESSES, 6, layer, layers, ALIGNED) + head).to(tl.float32)
    for depth in range(length):
        row = tl.load(PATH + request * s_path + depth)
        beta = tl.load(beta_of + row * sb_t + head).to(tl.float32)
        if LOGS is None:
            gate = tl.load(gate_of + row * sg_t + head * KEYS + i, mask=i < KEYS, other=0)
            state = state * tl.exp(gate.to(tl.float32))[:, None]
        else:
            gate = tl.load(gate_of + row * sg_t + head).to(tl.float32)
            state = state * tl.exp(-tl.exp(log) * softplus(gate + bias))
            beta = tl.sigmoid(beta)
        k = tl.load(k_of + row * sk_t + head // GROUP * KEYS + i, mask=i < KEYS, other=0)
        k = k.to(tl.float32)
        k = k / tl.sqrt(tl.sum(k * k, 0) + EPSILON)
        v = tl.load(v_of + row * sv_t + head * VALUES + j, mask=j < VALUES, other=0).to(tl.float32)
        u = (v - tl.sum(state * k[:, None], 0)) * beta
        state = state + k[:, None] * u[None, :]
        stored = state.to(STATES.dtype.element_ty)
        state = stored.to(tl.float32)  # as plain decoding rounds it
        if depth + 1 == end:
            tl.store(states + end_slot * s_slot + within, stored, mask=inside)
    tl.store(places, state.to(STATES.dtype.element_ty), mask=inside)


def advance_delta_rule(accepted: Commit, layers: Layers) -> None:
    """Advance states of a gated delta rule along accepted paths.

    ``layers``: their k, v, a, b, states, a_log and dt_bias, as `gated_delta_rule` takes them; the
    last two are left out where every channel decays by itself.
    """
    k, v, a, b, states, *_ = layers.first
    absent = [None] * (7 - len(layers.first))
    (_, heads, size), keys, count = v.shape, k.shape[2], layers.addresses.shape[1]
    block = 32
    grid = len(accepted.slots), heads * count, triton.cdiv(size, block)
    _delta_commit[grid](
        *layers.first, *absent, layers.addresses, *accepted, heads, count,
        k.stride(0), v.stride(0), a.stride(0), b.stride(0), *states.stride(),
        accepted.paths.stride(0), ALIGNED=layers.aligned, GROUP=heads // k.shape[1], KEYS=keys,
        VALUES=size, BK=triton.next_power_of_2(keys), BV=block, num_warps=4,
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
    RAW, HISTORY, ADDRESSES, SLOTS, PATH, COUNTS, ENDS, END_SLOTS, channels, layers, sr_t, s_slot,
    s_entry, s_channel, s_path, ALIGNED: tl.constexpr, ENTRIES: tl.constexpr, BE: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    request, layer = tl.program_id(0), tl.program_id(2)
    length = tl.load(COUNTS + request)
    if length == 0:
        return
    raw = _of_layer(RAW, ADDRESSES, 0, layer, layers, ALIGNED)
    histories = _of_layer(HISTORY, ADDRESSES, 1, layer, layers, ALIGNED)
    entry = tl.arange(0, BE)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (entry < ENTRIES)[:, None] & (c < channels)[None, :]
    history = histories + tl.load(SLOTS + request) * s_slot + c[None, :] * s_channel
    path, end = PATH + request * s_path, tl.load(ENDS + request)
    if (end > 0) & (end <= length):
        found = _inputs_until(raw, history, path, end, entry, c, inside, sr_t, s_entry, ENTRIES)
        other = histories + tl.load(END_SLOTS + request) * s_slot + c[None, :] * s_channel
        tl.store(other + entry[:, None] * s_entry, found, mask=inside)
    found = _inputs_until(raw, history, path, length, entry, c, inside, sr_t, s_entry, ENTRIES)
    # A program has all entries of its channels: nothing is overwritten before it is read.
    tl.debug_barrier()
    tl.store(history + entry[:, None] * s_entry, found, mask=inside)


def keep_history(accepted: Commit, layers: Layers) -> None:
    """Let histories of convolutions end with the inputs of accepted paths.

    Args:
        accepted: the paths.
        layers: their inputs [T, C], dense within a row, and histories [slots, W - 1, C], the latest
            input last.
    """
    raw, history = layers.first
    (_, entries, channels), count = history.shape, layers.addresses.shape[1]
    grid = len(accepted.slots), triton.cdiv(channels, CHANNELS), count
    _keep_history[grid](
        raw, history, layers.addresses, *accepted, channels, count, raw.stride(0),
        *history.stride(), accepted.paths.stride(0), ALIGNED=layers.aligned, ENTRIES=entries,
        BE=triton.next_power_of_2(entries), BC=CHANNELS, num_warps=4,
    )  # fmt: skip
