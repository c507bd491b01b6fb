"""vLLM's recurrent layers on a CPU, with trees and one state for each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import vllm._custom_ops as ops
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from dyntree_kernels.cpu.recurrence import Order, gated_delta_rule, sequences, state_space
from dyntree_kernels.cpu.tree_layers import Layer, PathCommit
from dyntree_kernels.recurrence import Commit, TreeStates, inputs
from dyntree_plugin.engine.rounding import truncates_bfloat16
from dyntree_plugin.engine.states.builders import DraftedRows, WithDraftsOnCPU
from dyntree_plugin.engine.states.rows import DeltaNetRows, Mamba2Rows, ShortConvRows, WithStates


class OnCPU(WithStates):
    """Runs the kernels of a CPU in a recurrent layer.

    An earlier stage of a pipeline gets the paths of a forward when as many others as there are
    stages may have begun.
    """

    builder = WithDraftsOnCPU
    # vLLM's operator for prompts of Mamba-2 on a CPU returns the states at their ends alone.
    within_prompts: ClassVar = {
        "num_prefill_checkpoint_blocks": 0,
        "prefill_checkpoint_alignment": None,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stages = get_pp_group()
        pending = 1 if stages.is_last_rank else stages.world_size
        self._read: deque[tuple[int, tuple[torch.Tensor, torch.Tensor]]] = deque(maxlen=pending)

    @property
    def layer(self) -> Layer:
        """The layer for the kernels."""
        raise NotImplementedError

    def through(
        self,
        drafted: DraftedRows,
        raw: torch.Tensor,
        gates: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        # Compiled code reuses the memory.
        read = raw.clone(), torch.cat([*gates, raw[:, :0]], dim=1)
        self._read.append((drafted.number, read))
        out[:] = drafted.trees(self.layer, *read)

    @classmethod
    def together(cls, layers: Sequence[Any]) -> Callable[[Commit, torch.Tensor], None]:
        def advance(commit: Commit, number: torch.Tensor) -> None:
            forward = int(number)  # sync: host memory
            if forward < 0:
                return
            path = PathCommit(commit)  # sync: host memory
            for layer in layers:
                layer.advance(path, forward)

        return advance

    def advance(self, commit: PathCommit, number: int) -> None:
        """Advance the states along accepted paths of the forward of this ``number``."""
        commit(self.layer, *dict(self._read)[number], self.kv_cache)

    def convolve(self, windows: torch.Tensor, weight: Any, bias: Any, activation: Any) -> Any:
        """Convolve inputs [M, width, C] to [M, C], as vLLM's decoding does."""
        before = windows[:, :-1].transpose(1, 2).contiguous()
        last = windows[:, -1].contiguous()
        return ops.causal_conv1d_update_cpu_vec(
            last, before, weight, bias, activation, None, None, -1
        )


class TreeMambaMixer2(OnCPU, Mamba2Rows, MambaMixer2):
    @property
    def layer(self) -> Layer:
        return Layer(self.history, self._convolve, self._outputs, self._decode)

    def _convolve(self, windows: torch.Tensor) -> Any:
        return self.convolve(windows, self.conv_weights, self.conv1d.bias, self.activation)

    def _outputs(self, mixed: torch.Tensor, gates: torch.Tensor, order: Order) -> torch.Tensor:
        x, b, c = self.split(mixed)
        given = self.kv_cache[1], x, gates, self.A, b, c, self.D, self.dt_bias
        return state_space(order, *given, truncate=truncates_bfloat16())

    def _decode(self, mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> None:
        x, b, c = self.split(mixed)
        at, states = slots.int(), self.kv_cache[1]
        dt, d, bias = (
            each[..., None].expand(*each.shape, self.head_dim)
            for each in (gates, self.D, self.dt_bias)
        )
        a = self.A[:, None, None].expand(states.shape[1:])
        ops.selective_state_update_cpu(
            states, x, dt, a, b, c, d, None, bias, True, at, at, 0, torch.empty_like(x), None, None
        )


class TreeShortConv(OnCPU, ShortConvRows, ShortConv):
    @property
    def layer(self) -> Layer:
        return Layer(self.history, self._convolve)

    def _convolve(self, windows: torch.Tensor) -> Any:
        conv: Any = self.conv
        return self.convolve(windows, conv.weight.squeeze(1), conv.bias, None)


class TreeGatedDeltaNet(OnCPU, DeltaNetRows, QwenGatedDeltaNetAttention):
    """vLLM's operators for a CPU take bfloat16 alone. In float32 our kernel runs all rows."""

    # Of vLLM's forwards, this one enters the core by an operator that asks the layer for it.
    forward_cpu = QwenGatedDeltaNetAttention.forward_cuda

    def in_order(self, metadata: Any, *given: torch.Tensor) -> None:
        if metadata is None:
            return
        if given[0].dtype == torch.bfloat16:
            gdn_attention._cpu_gdn_attention_nonspec(self, metadata, *given)
        else:
            self._in_order(metadata, *given)

    @property
    def layer(self) -> Layer:
        return Layer(self.history, self._convolve, self._outputs, self._decode)

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

    def _outputs(self, mixed: torch.Tensor, gates: torch.Tensor, order: Order) -> torch.Tensor:
        q, k, v = self.split(mixed)
        a, b = gates.chunk(2, dim=1)
        return gated_delta_rule(order, self._states, q, k, v, a, b, self.A_log, self.dt_bias)

    def _decode(self, mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> None:
        starts = torch.arange(len(slots) + 1)
        if mixed.dtype != torch.bfloat16:
            self._outputs(mixed, gates, sequences(slots, starts))
            return
        q, k, v = (each[None].contiguous() for each in self.split(mixed))
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
