"""vLLM's recurrent layers on CUDA, with trees and one state for each request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from dyntree_kernels.cuda.recurrence import RecurrentRows, convolve, gated_delta_rule, state_space
from dyntree_kernels.cuda.state_commits import (
    Layers,
    advance_delta_rule,
    advance_state_space,
    keep_history,
)
from dyntree_kernels.recurrence import Commit
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.states.builders import NOT_KEPT, DraftedRows, WithDrafts
from dyntree_plugin.engine.states.rows import (
    DeltaNetRows,
    KimiDeltaRows,
    Mamba2Rows,
    ShortConvRows,
    WithStates,
)


def _columns(vllm_config: Any) -> int:
    """Return the rows of the largest tree, its root included."""
    plan = tree_plan(vllm_config)
    if plan is None:
        raise RuntimeError("layers for trees were chosen for an engine without them")
    return plan.shape.node_budget + 1


class WithDraftsOnCUDA(WithDrafts):
    """As `WithDrafts`, for the kernels of CUDA.

    A graph of a uniform batch holds the kernels of trees only. What they read lies in buffers,
    which every `build` fills.
    """

    def __init__(self, spec: Any, names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(spec, names, vllm_config, device)
        columns, requests = _columns(vllm_config), vllm_config.scheduler_config.max_num_seqs
        self.masks = MaskBuffers(requests, requests * columns, columns, device)
        # Rows of a request for which there are kernels; each number may need another.
        self._compiled = {columns}

    @classmethod
    def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_BATCH

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        common = common_attn_metadata
        if common.max_query_len == 1:
            return self.build(0, common)
        self._compiled.add(common.max_query_len)
        requests, rows = common.num_reqs, common.num_actual_tokens
        self._place(common, requests)
        trees = self._rows_of(common, requests, rows)
        return DraftedRows(NOT_KEPT, self.kept[:1, 1], rows, trees, None)

    def trees_of(
        self, common: CommonAttentionMetadata, drafted: int, rows: int, mask: TreeMask
    ) -> RecurrentRows:
        masks = mask.ctx_lens[:drafted], mask.ancestor_bits[:rows]
        return self._rows_of(common, drafted, rows, *masks, all_trees=not mask.has_plain)

    def _rows_of(
        self,
        common: CommonAttentionMetadata,
        requests: int,
        rows: int,
        *masks: torch.Tensor,
        all_trees: bool = False,
    ) -> RecurrentRows:
        starts = common.query_start_loc[: requests + 1]
        filled = self.masks.fill(
            starts, common.seq_lens[:requests], rows, *masks, all_trees=all_trees
        )
        fit = (each for each in self._compiled if each >= common.max_query_len)
        most = min(fit, default=self.masks.columns)
        return RecurrentRows(self.kept[:requests, 0], starts, *filled, most)

    def warm_up(self, *_: Any) -> None:
        """Do nothing: `StateKind` has compiled what the layers run."""


class Forwards:
    """The tensors of layers, for each of the forwards whose paths may still come."""

    def __init__(self, forwards: Iterable[Sequence[tuple[torch.Tensor, ...]]]) -> None:
        each = [Layers.of(layers) for layers in forwards if layers[0]]
        self.have_tensors = bool(each)
        self._each = each
        if len(each) > 1:
            self._addresses = torch.stack([one.addresses for one in each])
            self._aligned = math.gcd(*(one.aligned for one in each))

    def of(self, number: torch.Tensor) -> Layers:
        """Return those of the forward of this ``number`` []."""
        first = self._each[0]
        if len(self._each) == 1:
            return first
        at = number.reshape(1).long() % len(self._each)
        addresses = self._addresses.index_select(0, at)[0]
        return first._replace(addresses=addresses, aligned=self._aligned)


class OnCUDA(WithStates):
    """Runs the kernels of CUDA in a recurrent layer.

    What they read of a step's rows has places that stay the same, for captured graphs. These exist
    before vLLM measures memory. An earlier stage of a pipeline gets the paths of a forward when as
    many others as there are stages may have begun, so it has a copy for each of them.
    """

    builder = WithDraftsOnCUDA
    gate_type: torch.dtype | None = None
    """Of the gates, if that is not the model's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        scheduler, columns = config.scheduler_config, _columns(config)
        rows = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * columns)
        channels, gates = self.sizes
        self._columns = columns
        self._raw = torch.zeros(rows, channels)
        # A convolution alone leaves nothing that a recurrence reads.
        self._mixed = torch.zeros(rows if gates else 0, channels)
        self._gates = torch.zeros(rows, gates, dtype=self.gate_type)
        stages, own = get_pp_group(), (self._raw, self._mixed, self._gates)
        self._copies: list[torch.Tensor] = []
        if not stages.is_last_rank:
            self._copies = [each.new_zeros(stages.world_size, *each.shape) for each in own]

    @property
    def records(self) -> list[tuple[torch.Tensor, ...]]:
        """What commits read of each forward whose paths may still come: the inputs of the
        convolution, what was convolved, and the gates."""
        if self._copies:
            return [*zip(*self._copies, strict=True)]
        return [(self._raw, self._mixed, self._gates)]

    @property
    def sizes(self) -> tuple[int, int]:
        """The channels of the convolution, and the number of gates of a row."""
        raise NotImplementedError

    @property
    def convolution(self) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        """Weights [C, W], bias [C], and whether a SiLU follows."""
        conv = self.of_vllm.conv1d
        return conv.weight.squeeze(1), conv.bias, self.of_vllm.activation == "silu"

    def outputs(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the part of what was convolved that has the shape of the recurrence's outputs."""
        return mixed

    def recur(
        self, trees: RecurrentRows, mixed: torch.Tensor, gates: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Run what was convolved [T, C] and gates [T, G] through the recurrence."""

    def committed(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of a commit of the recurrence's states, as `advance_states` takes them, of a
        forward's `records`."""
        return ()

    @staticmethod
    def advance_states(accepted: Commit, layers: Layers) -> None:
        """Advance the recurrence's states."""

    def through(
        self,
        drafted: DraftedRows,
        raw: torch.Tensor,
        gates: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        rows, trees = len(raw), drafted.trees
        weight, bias, silu = self.convolution
        mixed = self._mixed[:rows] if gates else out
        convolve(trees, self.history, raw, weight, bias, silu, mixed, self._raw[:rows])
        if gates:
            torch.cat([*gates], dim=1, out=self._gates[:rows])
            self.recur(trees, mixed, self._gates[:rows], out)
        for copies, own in zip(self._copies, (self._raw, self._mixed, self._gates), strict=False):
            at = drafted.on_device % len(copies)
            copies[:, :rows].index_copy_(0, at, own[None, :rows])

    @classmethod
    def together(cls, layers: Sequence[Any]) -> Callable[[Commit, torch.Tensor], None]:
        of_forwards = [*zip(*(each.records for each in layers), strict=True)]
        histories = Forwards(
            [(raw, each.history) for each, (raw, _, _) in zip(layers, records, strict=True)]
            for records in of_forwards
        )
        states = Forwards(
            [each.committed(*read) for each, (_, *read) in zip(layers, records, strict=True)]
            for records in of_forwards
        )

        def advance(commit: Commit, number: torch.Tensor) -> None:
            if states.have_tensors:
                cls.advance_states(commit, states.of(number))
            keep_history(commit, histories.of(number))

        return advance

    def warm_up(self) -> None:
        device = self._raw.device
        none = torch.zeros(2, dtype=torch.int32, device=device)
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        bits = torch.zeros(1, -(-self._columns // 32), dtype=torch.int32, device=device)
        trees = RecurrentRows(slots, none, none[:1], bits, self._columns)
        weight, bias, silu = self.convolution
        mixed = self._mixed if len(self._mixed) else torch.empty_like(self._raw)
        convolve(trees, self.history, self._raw, weight, bias, silu, mixed, self._raw)
        if len(self._mixed):
            self.recur(trees, self._mixed, self._gates, torch.empty_like(self.outputs(self._mixed)))
        nothing = torch.zeros(1, self._columns, dtype=torch.int64, device=device)
        self.together([self])(Commit(slots, nothing, slots, slots, slots), slots)


class TreeMambaMixer2(OnCUDA, Mamba2Rows, MambaMixer2):
    @property
    def sizes(self) -> tuple[int, int]:
        return self.tped_conv_size, self.tped_dt_size

    def outputs(self, mixed: torch.Tensor) -> torch.Tensor:
        x, _, _ = self.split(mixed)
        return x

    def recur(
        self, trees: RecurrentRows, mixed: torch.Tensor, gates: torch.Tensor, out: torch.Tensor
    ) -> None:
        x, b, c = self.split(mixed)
        given = x, gates, self.A, b, c, self.D, self.dt_bias
        state_space(trees, self.kv_cache[1], *given, out)

    advance_states = staticmethod(advance_state_space)

    def committed(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, b, _ = self.split(mixed)
        return x, gates, b, self.kv_cache[1], self.A, self.dt_bias


class TreeShortConv(OnCUDA, ShortConvRows, ShortConv):
    @property
    def sizes(self) -> tuple[int, int]:
        conv: Any = self.conv
        return len(conv.weight), 0

    @property
    def convolution(self) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        conv: Any = self.conv
        return conv.weight.squeeze(1), conv.bias, False


class DeltaRule(OnCUDA):
    """Precedes rows of a gated delta rule, which split what was convolved into q, k and v, and
    gates into a and b, as `gated_delta_rule` takes them."""

    split: Any
    split_gates: Any
    advance_states = staticmethod(advance_delta_rule)

    @property
    def decays(self) -> tuple[torch.Tensor, ...]:
        """Its a_log and dt_bias, or nothing if the gates have log decays."""
        return ()

    def outputs(self, mixed: torch.Tensor) -> torch.Tensor:
        v: torch.Tensor
        _, _, v = self.split(mixed)
        return v

    @property
    def states(self) -> torch.Tensor:
        """The states [slots, HV, K, V]; vLLM stores them with V before K."""
        states: torch.Tensor = self.kv_cache[1]
        return states.transpose(2, 3)

    def recur(
        self, trees: RecurrentRows, mixed: torch.Tensor, gates: torch.Tensor, out: torch.Tensor
    ) -> None:
        (q, k, v), (a, b) = self.split(mixed), self.split_gates(gates)
        a_log, dt_bias = self.decays or (None, None)
        gated_delta_rule(trees, self.states, q, k, v, a, b, a_log, dt_bias, out)

    def committed(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (_, k, v), (a, b) = self.split(mixed), self.split_gates(gates)
        return k, v, a, b, self.states, *self.decays


class TreeGatedDeltaNet(DeltaRule, DeltaNetRows, QwenGatedDeltaNetAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's fused kernel would read the rows of a tree as a chain.
        self.enable_fused_gdn_spec_decode = False

    @property
    def sizes(self) -> tuple[int, int]:
        return self.conv_dim // self.tp_size, 2 * self.num_v_heads // self.tp_size

    @property
    def decays(self) -> tuple[torch.Tensor, ...]:
        return self.A_log, self.dt_bias

    def in_order(self, metadata: Any, *given: torch.Tensor) -> None:
        QwenGatedDeltaNetAttention._forward_core(self, *given)


class TreeKimiDelta(DeltaRule, KimiDeltaRows, BailingMoeV3KimiDeltaAttention):
    gate_type = torch.float32  # in which vLLM has the log decays

    @property
    def sizes(self) -> tuple[int, int]:
        channels = self.projection_size_per_partition
        return 3 * channels, channels + self.local_num_heads

    @property
    def convolution(self) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        # A copy for each forward, of kilobytes, follows weights that are replaced.
        each: Any = self.q_conv1d, self.k_conv1d, self.v_conv1d
        return torch.cat([conv.weight for conv in each]).squeeze(1), None, True

    def in_order(self, metadata: Any, *given: torch.Tensor) -> None:
        BailingMoeV3KimiDeltaAttention._forward(self, *given)
