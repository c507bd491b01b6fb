"""Recurrent layers of vLLM with trees and one state for each request, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend

from dyntree_kernels.recurrence import Commit
from dyntree_plugin.engine.states.builders import DraftedRows, with_drafts


class WithStates:
    """Precedes a recurrent layer of vLLM: keeps one state per request, and advances it by a path.

    Between the forward of drafts and the commit of their path the layer holds what its convolution
    and its recurrence read of these rows. `advance` is in a class of each device.
    """

    prefix: str
    kv_cache: Any
    stock: type[AttentionBackend]
    """vLLM's backend of the layer."""
    builder: type
    """What precedes the backend's builder on the device."""
    within_prompts: ClassVar[Mapping[str, Any]] = {}
    """What the KV cache's specification says of states that a prompt's forward keeps before its
    end, if the device differs from vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0  # The convolution's history has no room for drafts.

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        own = self.within_prompts
        return None if spec is None else replace(spec, num_speculative_blocks=0, **own)

    def get_attn_backend(self) -> type[AttentionBackend]:
        backend: type[AttentionBackend] = with_drafts(self.stock, self.builder)
        return backend

    @property
    def of_vllm(self) -> Any:
        """The layer, with what vLLM's class has."""
        return self

    @property
    def history(self) -> torch.Tensor:
        """The convolution's last inputs, [slots, width - 1, channels]; as NIXL wants them stored,
        channels come first."""
        history: torch.Tensor = self.kv_cache[0]
        return history.transpose(1, 2) if is_conv_state_dim_first() else history

    def drafted(self) -> DraftedRows | None:
        """Return the rows of this forward's requests with drafts; None if there are none."""
        metadata = self.metadata()
        return metadata if isinstance(metadata, DraftedRows) else None

    def metadata(self) -> Any:
        """Return the metadata of this forward; None while vLLM measures memory."""
        metadata: Any = get_forward_context().attn_metadata
        return None if metadata is None else metadata.get(self.prefix)

    @contextmanager
    def without(self, drafted: DraftedRows) -> Iterator[None]:
        """Let vLLM's forward of this layer run the other rows."""
        metadata: Any = get_forward_context().attn_metadata
        stock = metadata[self.prefix]
        metadata[self.prefix] = drafted.rest
        try:
            yield
        finally:
            metadata[self.prefix] = stock

    def through(
        self,
        drafted: DraftedRows,
        raw: torch.Tensor,
        gates: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Run the rows of drafts with inputs ``raw`` [T, C] and ``gates``, [T, G] together, into
        ``out``; states stay."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Compile what the forward runs; the caches are there."""

    @classmethod
    def together(cls, layers: Sequence[Any]) -> Callable[[Commit, torch.Tensor], None]:
        """Return what advances the states of one group's layers along accepted paths of a forward;
        it takes the forward's number [] as well, negative for no paths."""
        raise NotImplementedError


class Mamba2Rows(WithStates):
    """Precedes vLLM's ``MambaMixer2``."""

    stock = Mamba2AttentionBackend

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        drafted, layer = self.drafted(), self.of_vllm
        stock: Any = super()
        if drafted is None:
            stock.conv_ssm_forward(projected_states, output)
            return
        rows = drafted.rows
        # The rest are gates of the layer's output.
        read: Any = projected_states[:rows, layer.tped_intermediate_size :]
        raw, gates = read.split([layer.tped_conv_size, layer.tped_dt_size], dim=1)
        self.through(drafted, raw, [gates], output[:rows].view(rows, -1, layer.head_dim))
        if drafted.rest is not None:
            with self.without(drafted):
                stock.conv_ssm_forward(projected_states[rows:], output[rows:])

    def split(self, mixed: torch.Tensor) -> Iterator[torch.Tensor]:
        """Split what was convolved into x [T, H, P], B [T, G, N] and C."""
        layer = self.of_vllm
        sizes = layer.head_dim, layer.ssm_state_size, layer.ssm_state_size
        parts = layer.split_hidden_states_B_C_fn(mixed)
        return (part.unflatten(1, (-1, each)) for part, each in zip(parts, sizes, strict=True))


class ShortConvRows(WithStates):
    """Precedes vLLM's ``ShortConv``."""

    stock = ShortConvAttentionBackend

    def forward_native(self, hidden_states: torch.Tensor, output: torch.Tensor) -> Any:
        stock: Any = super()
        return self._around(stock.forward_native, hidden_states, output)

    def forward_cuda(self, hidden_states: torch.Tensor, output: torch.Tensor) -> Any:
        stock: Any = super()
        return self._around(stock.forward_cuda, hidden_states, output)

    def _around(
        self, stock: Callable[..., Any], hidden_states: torch.Tensor, output: torch.Tensor
    ) -> Any:
        drafted, layer = self.drafted(), self.of_vllm
        if drafted is None:
            return stock(hidden_states, output)
        rows = drafted.rows
        # vLLM maps adapters to the rows of a whole step, so all of them are projected at once.
        projected, _ = layer.in_proj(hidden_states)
        before, after, x = projected[:rows].chunk(3, dim=-1)
        mixed = projected.new_zeros(len(projected), x.shape[1])
        self.through(drafted, before * x, [], mixed[:rows])
        mixed[:rows] *= after
        if drafted.rest is not None:
            with self.without(drafted), self._projected(projected[rows:]):
                stock(hidden_states[rows:], mixed[rows:])
        output[:], _ = layer.out_proj(mixed)
        return None

    @contextmanager
    def _projected(self, rows: torch.Tensor) -> Iterator[None]:
        """Let vLLM's forward of this layer take ``rows`` as its inputs' projection, and return what
        it would project."""
        own = vars(self)  # where Python looks before it asks for a module of that name
        own |= {"in_proj": lambda _: (rows, None), "out_proj": lambda mixed: (mixed, None)}
        try:
            yield
        finally:
            del own["in_proj"], own["out_proj"]


class DeltaNetRows(WithStates):
    """Precedes vLLM's ``QwenGatedDeltaNetAttention``: Gated DeltaNet (arXiv 2412.06464) as in
    Qwen3-Next and Qwen3.5."""

    stock = GDNAttentionBackend

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        drafted = self.drafted()
        given = mixed_qkv, b, a, core_attn_out
        if drafted is None:
            self.in_order(self.metadata(), *given)
            return
        rows = drafted.rows
        raw, b, a, out = (each[:rows] for each in given)
        self.through(drafted, raw, [a, b], out)
        if drafted.rest is not None:
            with self.without(drafted):
                self.in_order(drafted.rest, *(each[rows:] for each in given))

    def in_order(self, metadata: Any, *given: torch.Tensor) -> None:
        """Run rows that follow each other in their requests, and advance the states; arguments as
        of `_forward_core`, with their metadata."""
        raise NotImplementedError

    def split(self, mixed: torch.Tensor) -> Iterator[torch.Tensor]:
        """Split what was convolved into queries and keys [T, H, K] and values [T, HV, V]."""
        layer = self.of_vllm
        keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
        sizes = layer.head_k_dim, layer.head_k_dim, layer.head_v_dim
        split: Any = mixed.split
        parts = split([keys, keys, values], dim=1)
        return (part.unflatten(1, (-1, each)) for part, each in zip(parts, sizes, strict=True))

    def split_gates(self, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split gates [T, 2 * HV] into those of decays and those of betas [T, HV]."""
        return gates.chunk(2, dim=1)


class KimiDeltaRows(WithStates):
    """Precedes vLLM's ``BailingMoeV3KimiDeltaAttention``: Kimi Delta Attention (arXiv 2510.26692),
    in which every channel of a key decays by itself, as in Ling-3.0."""

    stock = GDNAttentionBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_speculative_tokens = 0  # vLLM's name of `num_spec` in this class

    def _forward(
        self,
        q_proj_states: torch.Tensor,
        k_proj_states: torch.Tensor,
        v_proj_states: torch.Tensor,
        g1: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        drafted = self.drafted()
        states = q_proj_states, k_proj_states, v_proj_states
        others = g1, beta, core_attn_out  # [1, T, ...]: log decays, betas and outputs
        if drafted is None:
            self.in_order(self.metadata(), *states, *others)
            return
        rows = drafted.rows
        raw = torch.cat([each[:rows] for each in states], dim=1)
        logs, betas, out = (each[0, :rows] for each in others)
        self.through(drafted, raw, [logs.flatten(1), betas], out)
        if drafted.rest is not None:
            rest = (*(each[rows:] for each in states), *(each[:, rows:] for each in others))
            with self.without(drafted):
                self.in_order(drafted.rest, *rest)

    def in_order(self, metadata: Any, *given: torch.Tensor) -> None:
        """Run rows that follow each other in their requests, and advance the states; arguments as
        of `_forward`, with their metadata."""
        raise NotImplementedError

    def split(self, mixed: torch.Tensor) -> Iterator[torch.Tensor]:
        """Split what was convolved into queries, keys and values [T, H, K]."""
        parts: Any = mixed.chunk(3, dim=1)
        return (part.unflatten(1, (-1, self.of_vllm.head_dim)) for part in parts)

    def split_gates(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split gates [T, H * K + H] into log decays [T, H, K] and betas [T, H]."""
        heads = self.of_vllm.local_num_heads
        logs: Any = gates[:, :-heads]
        return logs.unflatten(1, (heads, -1)), gates[:, -heads:]
