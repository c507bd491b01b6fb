"""vLLM's speculator with trees that a head of the target drafts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator

from dyntree_plugin.engine.agreement import sizes_alone
from dyntree_plugin.engine.offloading import on_device
from dyntree_plugin.engine.pipeline.whole_draft import as_one_stage
from dyntree_plugin.engine.sources.head import ContextHead, HeadStates, TargetHead
from dyntree_plugin.engine.speculator import NodeProposals
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.tree.plan import TreePlan


class HeadSpeculator(NodeProposals):
    """Loads, profiles and places a head as the stock class does."""

    source: type[TargetHead] = TargetHead

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Before vLLM profiles the memory, so that it is counted.
        self.allocate(self.compose.trees.plan)

    def allocate(self, plan: TreePlan) -> None:
        """Make room for what passes from one forward to another."""
        self.states = HeadStates(
            self.max_num_reqs,
            plan.shape.max_depth + 1,
            1 + plan.scratch_slots,
            self.hidden_size,
            self.logits_size,
            self.dtype,  # type: ignore[arg-type]  # vLLM has resolved its name by now
            self.device,
        )

    @property
    def logits_size(self) -> int:
        """Size of what gives a row's logits."""
        return self.hidden_size

    @on_device()
    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the head, which shares the target's embedding and output layer if it has none."""
        return load_eagle_model(target_model, self.vllm_config)

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        return self.source(self, self, self.states, memory, writer)

    def rehearse(
        self, batch: InputBatch, hidden: tuple[torch.Tensor, ...], most_logits: bool
    ) -> None:
        """Run one forward."""
        rows = batch.num_tokens
        joined = torch.cat([layer[:rows] for layer in hidden], dim=-1)
        # A catch-up selects rows, too; in vLLM's profile this is as large as it ever is.
        every = torch.arange(rows, device=joined.device)
        states = self.combine(joined.index_select(0, every))
        ids, positions = batch.input_ids[:rows], batch.positions[:rows]
        found, _ = self.run(ids, positions, states, None, None)
        self.compute_draft_logits(found[self.rows_of_logits(batch, most_logits)], 0)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the target's hidden states into the head's input; see `LoadedHead`."""
        if self.method != "eagle3":
            return hidden
        model: Any = self.model
        combined: torch.Tensor = model.combine_hidden_states(hidden)
        return combined

    @as_one_stage()
    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows of the head; see `LoadedHead`."""
        with forward_context(self.vllm_config, len(ids), metadata, slots):
            found = self.model(
                input_ids=ids, positions=positions, hidden_states=states, inputs_embeds=None
            )
        # Some heads return one tensor for both.
        return found if isinstance(found, tuple) else (found, found)


class ContextSpeculator(HeadSpeculator, Gemma4Speculator):
    """Drafts with Gemma-4's module, which reads the target's KV cache."""

    source = ContextHead
    context_only = True
    load_draft_model = on_device()(Gemma4Speculator.load_draft_model)

    @property
    def logits_size(self) -> int:
        # The module is narrower than the states that it hands on, which have the target's size.
        return int(self.draft_model_config.hf_text_config.hidden_size)


def forward_context(
    vllm_config: VllmConfig,
    rows: int,
    metadata: dict[str, Any] | None,
    slots: dict[str, torch.Tensor] | None,
) -> AbstractContextManager[None]:
    """Return vLLM's context of a forward over so many rows, without a graph."""
    return set_forward_context(
        metadata,
        vllm_config,
        num_tokens=rows,
        num_tokens_across_dp=sizes_alone(vllm_config, rows),
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        slot_mapping=slots,
        batch_descriptor=BatchDescriptor(num_tokens=rows),
    )
