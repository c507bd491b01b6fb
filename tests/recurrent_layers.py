"""Recurrent layers with random weights, and their decoding as vLLM does it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm._custom_ops as ops
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu

from dyntree_kernels.ancestors import ancestor_bits
from dyntree_kernels.cpu.recurrence import Order, gated_delta_rule, sequences, state_space
from dyntree_kernels.cpu.tree_layers import Layer
from dyntree_kernels.recurrence import TreeStates
from dyntree_plugin.engine.rounding import truncates_bfloat16

WIDTH = 4
KINDS = ("gdn", "mamba2", "short conv")


@dataclass
class Decoder:
    """A layer with states of its own.

    ``decode`` takes inputs [M, C], gates [M, G] and slots int64 [M], advances the states there by a
    token, and returns the outputs: vLLM's plain decoding, but for the gated delta rule in float32.
    """

    layer: Layer
    states: torch.Tensor
    decode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    channels: int
    gates: int

    def copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.states.clone(), self.layer.history.clone()

    def restore(self, copies: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.states.copy_(copies[0])
        self.layer.history.copy_(copies[1])

    def rows(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw inputs and gates of so many rows."""
        dtype = self.layer.history.dtype
        raw = torch.randn(count, self.channels, generator=generator).to(dtype)
        return raw, torch.randn(count, self.gates, generator=generator).to(dtype)


def make(kind: str, dtype: torch.dtype, slots: int, generator: torch.Generator) -> Decoder:
    """Make a layer of two heads of 64 or more; its first slot is vLLM's null block."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    channels = {"gdn": 2 * 64 + 2 * 64, "mamba2": 4 * 8 + 2 * 16, "short conv": 48}[kind]
    weight, history = rand(channels, WIDTH).to(dtype), rand(slots, WIDTH - 1, channels).to(dtype)
    activation = None if kind == "short conv" else "silu"

    def convolve(windows: torch.Tensor) -> torch.Tensor:
        before = windows[:, :-1].transpose(1, 2).contiguous()
        last = windows[:, -1].contiguous()
        return ops.causal_conv1d_update_cpu_vec(
            last, before, weight, None, activation, None, None, -1
        )

    if kind == "short conv":
        states, gates, through, advance = torch.empty(0), 0, None, None
    else:
        states, gates, through, advance = (_gdn if kind == "gdn" else _mamba2)(dtype, slots, rand)

    def decode(raw: torch.Tensor, gate: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        conv_state = history.transpose(1, 2)
        mixed = causal_conv1d_update_cpu(
            raw, conv_state, weight, None, activation, conv_state_indices=slots.int()
        )
        return mixed if advance is None else advance(mixed, gate, slots)

    return Decoder(Layer(history, convolve, through, advance), states, decode, channels, gates)


def _mamba2(dtype: torch.dtype, slots: int, rand: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    heads, size, width = 4, 8, 16
    states = rand(slots, heads, size, width).to(dtype)
    a, d, bias = -rand(heads).exp(), rand(heads), rand(heads)

    def split(mixed: torch.Tensor) -> list[torch.Tensor]:
        x, b, c = mixed.split([heads * size, width, width], 1)
        return [x.unflatten(1, (heads, size)), b[:, None], c[:, None]]

    def through(mixed: torch.Tensor, gates: torch.Tensor, order: Order) -> torch.Tensor:
        x, b, c = split(mixed)
        return state_space(order, states, x, gates, a, b, c, d, bias, truncate=truncates_bfloat16())

    def advance(mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        (x, b, c), at = split(mixed), slots.int()
        out = torch.empty(x.shape, dtype=dtype)
        wide = [each[..., None].expand(*each.shape, size) for each in (gates, d, bias)]
        ops.selective_state_update_cpu(
            states, x, wide[0], a[:, None, None].expand(heads, size, width), b, c, wide[1], None,
            wide[2], True, at, at, 0, out, None, None,
        )  # fmt: skip
        return out

    return states, heads, through, advance


def _gdn(dtype: torch.dtype, slots: int, rand: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    heads, size = 2, 64
    states = 0.3 * rand(slots, heads, size, size)
    a_log, bias = rand(heads), rand(heads).to(dtype)

    def through(mixed: torch.Tensor, gates: torch.Tensor, order: Order) -> torch.Tensor:
        q, k, v = (
            each.unflatten(1, (-1, size)) for each in mixed.split([size, size, heads * size], 1)
        )
        return gated_delta_rule(order, states, q, k, v, *gates.chunk(2, 1), a_log, bias)

    def advance(mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(len(slots) + 1)
        if dtype == torch.float32:
            return through(mixed, gates, sequences(slots, starts))
        q, k, v = (
            each.reshape(1, len(slots), -1, size)
            for each in mixed.split([size, size, heads * size], 1)
        )
        a, b = (each.contiguous() for each in gates.chunk(2, 1))
        found = ops.fused_sigmoid_gating_delta_rule_update_cpu(
            a_log, bias, q, k, v, a, b, states, slots.int(), starts.int(), True
        )
        return found.squeeze(1)

    return states, 2 * heads, through, advance


def tree_states(
    parents: list[list[int]], slots: list[int], plain: tuple[int, ...] = ()
) -> TreeStates:
    """Return what layers read of trees, given as parents within each request.

    Requests ``plain`` have no tree: their bits are wrong, and their rows are a chain.
    """
    starts = torch.tensor([0, *map(len, parents)]).cumsum(0).int()
    most = max(map(len, parents))
    bits = [ancestor_bits(torch.tensor([each + [-1] * (most - len(each))]))[0, : len(each)]
            for each in parents]  # fmt: skip
    ctx_lens = torch.tensor([-1 if r in plain else 7 for r in range(len(parents))])
    return TreeStates.of(torch.tensor(slots), starts, ctx_lens, torch.cat(bits))


def path_to(row: int, parents: list[int]) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
