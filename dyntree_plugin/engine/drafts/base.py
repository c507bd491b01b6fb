"""vLLM's speculators with trees instead of chains: what vLLM calls while drafting."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator

from dyntree_plugin.admission import versions
from dyntree_plugin.engine.agreement import sizes_alone
from dyntree_plugin.engine.attention.metadata import refresh
from dyntree_plugin.engine.compose import Composer
from dyntree_plugin.engine.step.draft import Drafter
from dyntree_plugin.engine.step.records import Sampled, Step
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter
from dyntree_plugin.engine.step.source import NodeSource


class Steps(Protocol):
    """What a speculator reads of the runner whose trees it drafts."""

    @property
    def step(self) -> Step:
        """The step that runs."""
        ...

    def packed(self, batch: InputBatch) -> torch.Tensor:
        """Return the requests of the step on the host, as `Packer` describes them."""
        ...


class TreeProposals(BaseSpeculator):
    """The part of a speculator that does not depend on where its candidates come from."""

    steps: Steps
    compose: Composer
    drafter: Drafter
    draft_tokens: torch.Tensor
    """int64 [the most requests, node_budget], for steps that draft nothing."""

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make room for graphs; vLLM calls it whenever there is a new KV cache."""
        eager = cudagraph_mode == CUDAGraphMode.NONE
        self.compose.graphs.prepare(None if eager else self.drafter.stages)

    def capture(self) -> None:
        self.compose.graphs.capture()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Follow the fitted context. vLLM calls `set_attn` later, which reads it."""
        self.draft_max_seq_len = max_model_len
        if versions.keeps_own_length(self):
            self.max_model_len = max_model_len

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Grow the next trees of R requests; their node tokens, int64 [R, node_budget]."""
        num_reqs = input_batch.num_reqs
        hidden = tuple(aux_hidden_states or (last_hidden_states,))
        if dummy_run:
            self.rehearse(input_batch, hidden, most_logits=is_profile)
            return self.draft_tokens[:num_reqs]
        # The scheduler wants no drafts if trees do not pay. Since 0.33, vLLM wants none if no
        # request has a next step that could verify them: all read prompts, or end.
        sampled = Sampled(num_sampled, last_sampled, next_prefill_tokens[0], hidden)
        grows = num_speculative_tokens != 0
        step, packed = self.steps.step, self.steps.packed(input_batch)
        # The output is on its way to the host by now, and does not wait for what is learned.
        if step.learning is not None:
            self.compose.ops.clock.next("verify")
            step.learning()
        step.drafted = self.drafter.draft(step, packed, input_batch, sampled, grows=grows)
        drafts = step.drafted.tokens
        return self.draft_tokens[:num_reqs] if drafts is None else drafts

    def rehearse(
        self, batch: InputBatch, hidden: tuple[torch.Tensor, ...], most_logits: bool
    ) -> None:
        """Run what takes memory or has to be compiled, in vLLM's rehearsals.

        ``hidden``: the target's hidden states. ``most_logits``: with as many logits as there ever
        are, for vLLM's profile of memory.
        """

    def rows_of_logits(self, batch: InputBatch, most_logits: bool) -> torch.Tensor:
        """Return the rows of a ``batch`` whose logits `rehearse` computes."""
        width = 1
        # A CPU's cache has the size that the user sets.
        if most_logits and self.draft_tokens.device.type != "cpu":
            plan = self.compose.trees.plan
            width = plan.shape.block + max(plan.growing.widths, default=1)
        every = torch.arange(batch.num_reqs * width, device=batch.positions.device)
        return every % batch.num_tokens


class NodeProposals(TreeProposals, DraftModelSpeculator):
    """The part of a speculator whose candidates come from forwards of a model."""

    context_only = False
    """As in `RowMemory`."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, steps: Steps, compose: Composer
    ) -> None:
        super().__init__(vllm_config, device)
        self.steps, self.compose = steps, compose

    @property
    def row_shift(self) -> int:
        """Position of a row, less that of its token."""
        return self.compose.trees.plan.shape.shift

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the draft, which reads no images.

        For one that could, vLLM gathers them one token ahead of a step's end, where the scheduler
        has encoded none for a draft model.
        """
        super().load_model(target_model)
        self.supports_mm_inputs = False

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        plan, shift = self.compose.trees.plan, self.row_shift
        rows = plan.most_rows, plan.scratch_slots
        memory = RowMemory(self, *rows, shift, context_only=self.context_only)
        writer = self.compose.ops.row_writer(memory)
        self.drafter = self.compose.drafter(
            memory.of_growth, self.make_source(memory, writer), writer
        )

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        """Make what runs the loaded models over the rows in this ``memory``."""
        raise NotImplementedError


def forward_context(
    vllm_config: VllmConfig,
    rows: int,
    metadata: dict[str, Any] | None,
    slots: dict[str, torch.Tensor] | None,
) -> AbstractContextManager[None]:
    """Return vLLM's context of a forward over so many filled rows, without a graph."""
    refresh(metadata)
    return set_forward_context(
        metadata,
        vllm_config,
        num_tokens=rows,
        num_tokens_across_dp=sizes_alone(vllm_config, rows),
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        slot_mapping=slots,
        batch_descriptor=BatchDescriptor(num_tokens=rows),
    )
