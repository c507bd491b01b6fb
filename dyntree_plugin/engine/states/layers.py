"""vLLM's recurrent layers on a CPU, with trees and one state for each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import vllm._custom_ops as ops
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend

from dyntree_kernels.cpu.recurrence import Order, gated_delta_rule, sequences, state_space, trees
from dyntree_kernels.cpu.tree_layers import Layer, PathCommit
from dyntree_kernels.recurrence import TreeStates, inputs
from dyntree_plugin.engine.states.builders import Drafted, with_drafts

ONE_ROW = TreeStates(torch.zeros(1).long(), torch.arange(2), torch.tensor([-1]))


class WithStates:
    """Precedes a recurrent layer of vLLM: keeps one state per request, and advances it by a path.

    Between a forward of drafts and the commit of their paths the layer holds what its convolution
    and its recurrence read of these rows. An earlier stage of a pipeline gets the paths of a
    forward when as many others as there are stages may have begun.
    """

    prefix: str
    kv_cache: Any
    backend: ClassVar[type[AttentionBackend]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0  # The convolution's history has no room for drafts.
        stages = get_pp_group()
        pending = 1 if stages.is_last_rank else stages.world_size
        self._read: deque[tuple[int, tuple[torch.Tensor, torch.Tensor]]] = deque(maxlen=pending)

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
        return history

    def drafted(self) -> Drafted | None:
        """Return the rows of this forward's requests with drafts; None if there are none."""
        metadata = self.metadata()
        return metadata if isinstance(metadata, Drafted) else None

    def metadata(self) -> Any:
        """Return the metadata of this forward; None while vLLM measures memory."""
        metadata: Any = get_forward_context().attn_metadata
        return None if metadata is None else metadata.get(self.prefix)

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
        self._read.append((drafted.number, (raw, gates)))
        found: torch.Tensor = drafted.forward(self.layer, raw, gates)
        return found

    def warm_up(self) -> None:
        """Compile what the forward runs; the caches are there."""

    def advance(self, commit: PathCommit, number: int) -> None:
        """Advance the states along accepted paths of the forward of this number."""
        commit(self.layer, *dict(self._read)[number])

    def convolve(self, windows: torch.Tensor, weight: Any, bias: Any, activation: Any) -> Any:
        """Convolve inputs [M, width, C] to [M, C], as vLLM's decoding does."""
        before = windows[:, :-1].transpose(1, 2).contiguous()
        last = windows[:, -1].contiguous()
        return ops.causal_conv1d_update_cpu_vec(
            last, before, weight, bias, activation, None, None, -1
        )


class TreeMambaMixer2(WithStates, MambaMixer2):
    backend = with_drafts(Mamba2AttentionBackend)

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
        weights: Any = self.conv1d.weight
        mixed = torch.zeros(1, self.tped_conv_size, dtype=weights.dtype)
        self._outputs(mixed, mixed[:, : self.tped_dt_size], trees(ONE_ROW))

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
    backend = with_drafts(ShortConvAttentionBackend)

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


class TreeGatedDeltaNet(WithStates, QwenGatedDeltaNetAttention):
    """Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next and Qwen3.5.

    vLLM's operators for a CPU take bfloat16 alone. In float32 our kernel runs all rows.
    """

    backend = with_drafts(GDNAttentionBackend)
    # Of vLLM's forwards, this one enters the core by an operator that asks the layer for it.
    forward_cpu = QwenGatedDeltaNetAttention.forward_cuda

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        drafted, rest, rows = self.drafted(), self.metadata(), 0
        if drafted is not None:
            rest, rows = drafted.rest, drafted.rows
            gates = torch.cat([a[:rows], b[:rows]], dim=1)
            core_attn_out[:rows] = self.through(drafted, mixed_qkv[:rows].clone(), gates)
        if rest is None:
            return
        given = mixed_qkv[rows:], b[rows:], a[rows:], core_attn_out[rows:]
        if mixed_qkv.dtype == torch.bfloat16:
            gdn_attention._cpu_gdn_attention_nonspec(self, rest, *given)
        else:
            self._in_order(rest, *given)

    @property
    def layer(self) -> Layer:
        return Layer(self.history, self._convolve, self._outputs, self._decode)

    def warm_up(self) -> None:
        weights: Any = self.conv1d.weight
        mixed = torch.zeros(1, self.conv_dim // self.tp_size, dtype=weights.dtype)
        gates = mixed[:, : 2 * self.num_v_heads // self.tp_size]
        self._outputs(mixed, gates, trees(ONE_ROW))

    @property
    def _states(self) -> torch.Tensor:
        """The states [slots, heads, K, V], as vLLM's operators for a CPU keep them."""
        return gdn_attention._ssm_state_view(self)

    def _in_order(
        self,
        rest: Any,
        raw: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run rows that follow each other in their requests, and advance the states."""
        slots, starts = rest.non_spec_state_indices_tensor.long(), rest.non_spec_query_start_loc
        if rest.has_initial_state is not None:
            for state in self.kv_cache:
                state[slots[~rest.has_initial_state]] = 0
        count = rest.num_actual_tokens
        above = torch.arange(-1, count - 1)
        above[starts[:-1]] = -1
        rows = TreeStates(slots, starts, above)
        windows = inputs(
            rows.taps(self.conv_kernel_size), raw[:count], self.history, slots[rows.requests]
        )
        self.history[slots] = windows[starts[1:] - 1, 1:]
        gates = torch.cat([a[:count], b[:count]], dim=1)
        out[:count] = self._outputs(self._convolve(windows), gates, sequences(slots, starts))

    def _convolve(self, windows: torch.Tensor) -> Any:
        unpacked = gdn_attention._unpacked_conv_weight(self)
        packed: Any = self.conv1d.weight
        if unpacked.data_ptr() == packed.data_ptr():
            return self.convolve(windows, unpacked, self.conv1d.bias, self.activation)
        return ops.causal_conv1d_update_cpu(
            x=windows[:, -1].contiguous(),
            conv_states=windows[:, :-1].contiguous().transpose(1, 2),
            weight=packed,
            bias=self.conv1d.bias,
            silu_activation=self.activation == "silu",
            conv_state_indices=torch.arange(len(windows), dtype=torch.int32),
            is_weight_packed=True,
        )

    def _split(self, mixed: torch.Tensor) -> Any:
        split: Any = self.rearrange_mixed_qkv
        return split(mixed)

    def _outputs(self, mixed: torch.Tensor, gates: torch.Tensor, order: Order) -> torch.Tensor:
        q, k, v = (each[0] for each in self._split(mixed))
        a, b = gates.chunk(2, dim=1)
        return gated_delta_rule(order, self._states, q, k, v, a, b, self.A_log, self.dt_bias)

    def _decode(self, mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> None:
        starts = torch.arange(len(slots) + 1)
        if mixed.dtype != torch.bfloat16:
            self._outputs(mixed, gates, sequences(slots, starts))
            return
        q, k, v = self._split(mixed)
        a, b = (each.contiguous() for each in gates.chunk(2, dim=1))
        ops.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            initial_state_source=self._states,
            initial_state_indices=slots.int(),
            cu_seqlens=starts.int(),
            use_qk_l2norm_in_kernel=True,
        )
