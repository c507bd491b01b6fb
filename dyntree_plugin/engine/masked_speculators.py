"""vLLM's speculators with trees that drafts propose which read masks: PARD and P-EAGLE."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from dyntree_plugin.engine.head_speculator import HeadSpeculator
from dyntree_plugin.engine.sources.block import BlockDraft
from dyntree_plugin.engine.sources.masked_text import MaskedText
from dyntree_plugin.engine.speculator import TreeSpeculator
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.tree.padded import of_width, readable
from dyntree_plugin.tree.plan import TreePlan


class PARDSpeculator(TreeSpeculator):
    """Loads, profiles and places a draft model that reads masks as vLLM does others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mask_token = get_parallel_drafting_token_id(self.draft_model_config.hf_config)
        # Before vLLM profiles the memory, so that it is counted.
        self.proposing = room_of_block(self, self.compose.trees.plan)

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        reader = MaskedText(self, self, memory, writer, hidden=self.proposing)
        return BlockDraft(reader, memory, self.proposing.shape[1])

    def combine_masked(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a draft model reads no hidden states of the target")

    def run_masked(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        metadata: dict[str, Any] | None,
        slots: dict[str, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Run rows of the model; see `LoadedMasked`."""
        ids = readable(ids, self.compose.trees.vocabulary, self.vocab_size)
        return self._run_model(ids, positions, metadata, slots, None)

    def masked_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return of_width(self.compute_draft_logits(hidden, 0), self.compose.trees.vocabulary)


class PEagleSpeculator(HeadSpeculator):
    """Loads, profiles and places an EAGLE-3 head that reads masks as vLLM does others."""

    # A row has the target's state before its token.
    row_shift = -1

    def allocate(self, plan: TreePlan) -> None:
        self.mask_token = get_parallel_drafting_token_id(self.draft_model_config.hf_config)
        self.proposing = room_of_block(self, plan)
        most = 1 + self.max_num_reqs * (plan.shape.max_depth + 1)
        self.given = self.proposing.new_zeros(most, self.hidden_size)

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the head, whose class looks for the masks' state if drafting is parallel."""
        speculation = self.speculative_config
        speculation.parallel_drafting = True
        try:
            return super().load_draft_model(target_model, target_attn_layer_names)
        finally:
            speculation.parallel_drafting = False

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        reader = MaskedText(self, self, memory, writer, hidden=self.proposing, given=self.given)
        return BlockDraft(reader, memory, self.proposing.shape[1])

    def combine_masked(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn hidden states into the head's input, that of masks first; see `LoadedMasked`."""
        model: Any = self.model
        return self.combine(torch.cat([model.mask_hidden, hidden]))

    def run_masked(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        metadata: dict[str, Any] | None,
        slots: dict[str, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Run rows of the head; see `LoadedMasked`."""
        if states is None:
            raise RuntimeError("a head reads hidden states of the target")
        return self.run(ids, positions, states, metadata, slots)[0]

    def masked_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.compute_draft_logits(hidden, 0)


def room_of_block(model: DraftModelSpeculator, plan: TreePlan) -> torch.Tensor:
    """Allocate what gives the logits of the positions of R requests, [R, length, H]."""
    dtype: Any = model.dtype  # vLLM has resolved its name by now
    shape = model.max_num_reqs, plan.shape.block, model.hidden_size
    return torch.zeros(*shape, dtype=dtype, device=model.device)
