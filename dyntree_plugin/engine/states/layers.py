"""vLLM's recurrent layers on a CPU, with trees and one state for each request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import vllm._custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import AttentionBackend

from dyntree_kernels.cpu.recurrence import Order, state_space, trees
from dyntree_kernels.cpu.tree_layers import Layer, PathCommit
from dyntree_kernels.recurrence import TreeStates
from dyntree_plugin.engine.states.builders import (
    Drafted,
    TreeMamba2Backend,
    TreeShortConvBackend,
)


class WithStates:
    """Precedes a recurrent layer of vLLM: keeps one state per request, and advances it by a path.

    Between the forward of drafts and the commit of their path the layer holds what its convolution
    and its recurrence read of these rows.
    """

    prefix: str
    kv_cache: Any
    backend: ClassVar[type[AttentionBackend]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0  # The convolution's history has no room for drafts.
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        return None if spec is None else replace(spec, num_speculative_blocks=0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    @property
    def layer(self) -> Layer:
        """The layer for the kernels."""
        raise NotImplementedError

    @property
    def history(self) -> torch.Tensor:
        """The convolution's last inputs, [slots, width - 1, channels]."""
        history: torch.Tensor = self.kv_cache[0]
        if is_conv_state_dim_first():
            history = history.transpose(-1, -2)
        return history

    def drafted(self) -> Drafted | None:
        """Return the rows of this forward's requests with drafts; None if there are none."""
        metadata: Any = get_forward_context().attn_metadata
        return None if metadata is None else getattr(metadata.get(self.prefix), "drafted", None)

    @contextmanager
    def without(self, drafted: Drafted) -> Iterator[None]:
        """Let vLLM's forward of this layer run the other rows."""
        metadata: Any = get_forward_context().attn_metadata
        stock = metadata[self.prefix]
        metadata[self.prefix] = drafted.rest
        try:
            yield
        finally:
            metadata[self.prefix] = stock

    def through(self, drafted: Drafted, raw: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Run the rows of drafts with inputs ``raw`` [T, C] and ``gates`` [T, G]; states stay."""
        if len(drafted.fresh):
            for state in self.kv_cache:
                state[drafted.fresh] = 0
        self._read = raw, gates
        found: torch.Tensor = drafted.forward(self.layer, raw, gates)
        return found

    def warm_up(self) -> None:
        """Compile what the forward runs; the caches are there."""

    def advance(self, commit: PathCommit) -> None:
        """Advance the states along accepted paths of the last forward."""
        if self._read is None:
            raise RuntimeError(f"layer {self.prefix} has no forward whose paths it could keep")
        commit(self.layer, *self._read)

    def convolve(self, windows: torch.Tensor, weight: Any, bias: Any, activation: Any) -> Any:
        """Convolve inputs [M, width, C] to [M, C], as vLLM's decoding does."""
        before = windows[:, :-1].transpose(1, 2).contiguous()
        last = windows[:, -1].contiguous()
        return ops.causal_conv1d_update_cpu_vec(
            last, before, weight, bias, activation, None, None, -1
        )


class TreeMambaMixer2(WithStates, MambaMixer2):
    backend = TreeMamba2Backend

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        drafted = self.drafted()
        if drafted is None:
            super().conv_ssm_forward(projected_states, output)
            return
        rows = drafted.rows
        # The rest are gates of the layer's output. Compiled code reuses the memory.
        read: Any = projected_states[:rows, self.tped_intermediate_size :].clone()
        raw, gates = read.split([self.tped_conv_size, self.tped_dt_size], dim=1)
        output[:rows] = self.through(drafted, raw, gates).flatten(1)
        if drafted.rest is not None:
            with self.without(drafted):
                super().conv_ssm_forward(projected_states[rows:], output[rows:])

    @property
    def layer(self) -> Layer:
        return Layer(self.history, self._convolve, self._outputs, self._decode)

    def warm_up(self) -> None:
        row = TreeStates(torch.zeros(1).long(), torch.arange(2), torch.tensor([-1]))
        weights: Any = self.conv_weights
        mixed = torch.zeros(1, self.tped_conv_size, dtype=weights.dtype)
        self._outputs(mixed, mixed[:, : self.tped_dt_size], trees(row))

    def _convolve(self, windows: torch.Tensor) -> Any:
        return self.convolve(windows, self.conv_weights, self.conv1d.bias, self.activation)

    def _split(self, mixed: torch.Tensor) -> Iterator[torch.Tensor]:
        size = self.head_dim, self.ssm_state_size, self.ssm_state_size
        split: Any = self.split_hidden_states_B_C_fn
        parts: Any = split(mixed)
        return (part.unflatten(1, (-1, each)) for part, each in zip(parts, size, strict=True))

    def _outputs(self, mixed: torch.Tensor, gates: torch.Tensor, order: Order) -> torch.Tensor:
        x, b, c = self._split(mixed)
        return state_space(order, self.kv_cache[1], x, gates, self.A, b, c, self.D, self.dt_bias)

    def _decode(self, mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> None:
        x, b, c = self._split(mixed)
        at, states = slots.int(), self.kv_cache[1]
        dt, d, bias = (
            each[..., None].expand(*each.shape, self.head_dim)
            for each in (gates, self.D, self.dt_bias)
        )
        a = self.A[:, None, None].expand(states.shape[1:])
        ops.selective_state_update_cpu(
            states, x, dt, a, b, c, d, None, bias, True, at, at, 0, torch.empty_like(x), None, None
        )


class TreeShortConv(WithStates, ShortConv):
    backend = TreeShortConvBackend

    def forward_native(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        drafted = self.drafted()
        if drafted is None:
            super().forward_native(hidden_states, output)
            return
        rows = drafted.rows
        projected, _ = self.in_proj(hidden_states[:rows])
        before, after, x = projected.chunk(3, dim=-1)
        mixed = self.through(drafted, before * x, x[:, :0])
        output[:rows], _ = self.out_proj(after * mixed)
        if drafted.rest is not None:
            with self.without(drafted):
                super().forward_native(hidden_states[rows:], output[rows:])

    @property
    def layer(self) -> Layer:
        return Layer(self.history, self._convolve)

    def _convolve(self, windows: torch.Tensor) -> Any:
        conv: Any = self.conv
        return self.convolve(windows, conv.weight.squeeze(1), conv.bias, None)
