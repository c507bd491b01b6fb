"""vLLM's speculators with trees that drafts propose which read masks: PARD and P-EAGLE."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from dyntree_plugin.engine.head_speculator import HeadSpeculator
from dyntree_plugin.engine.sources.block import BlockDraft
from dyntree_plugin.engine.sources.draft_models import DraftModel, FilledRows
from dyntree_plugin.engine.sources.masked_text import MaskedText
from dyntree_plugin.engine.speculator import TreeSpeculator
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.tree.plan import TreePlan


class PARDSpeculator(TreeSpeculator):
    """Loads, profiles and places a draft model that reads masks as vLLM does others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Before vLLM profiles the memory, so that it is counted.
        self.proposing = room_of_block(self, self.compose.trees.plan)

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        model = DraftModel(self, memory, self.compose.trees.vocabulary)
        reader = MaskedText(
            lambda rows, _: model.hidden(rows),
            model.logits_of,
            *(self, memory, writer),
            mask=get_parallel_drafting_token_id(self.draft_model_config.hf_config),
            hidden=self.proposing,
        )
        return BlockDraft(reader, memory, self.proposing.shape[1])


class PEagleSpeculator(HeadSpeculator):
    """Loads, profiles and places an EAGLE-3 head that reads masks as vLLM does others."""

    # A row has the target's state before its token.
    row_shift = -1

    def allocate(self, plan: TreePlan) -> None:
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
        reader = MaskedText(
            self.run_masked,
            partial(self.compute_draft_logits, spec_step_idx=0),
            *(self, memory, writer),
            mask=get_parallel_drafting_token_id(self.draft_model_config.hf_config),
            hidden=self.proposing,
            of_head=(self.combine_masked, self.given),
        )
        return BlockDraft(reader, memory, self.proposing.shape[1])

    def combine_masked(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn hidden states into the head's input, that of masks first."""
        model: Any = self.model
        return self.combine(torch.cat([model.mask_hidden, hidden]))

    def run_masked(self, rows: FilledRows, states: Any) -> torch.Tensor:
        """Run rows of the head; return what gives their logits."""
        return self.run(rows.ids, rows.positions, states, rows.metadata, rows.slots_by_layer)[0]


def room_of_block(model: DraftModelSpeculator, plan: TreePlan) -> torch.Tensor:
    """Allocate what gives the logits of the positions of R requests, [R, length, H]."""
    dtype: Any = model.dtype  # vLLM has resolved its name by now
    shape = model.max_num_reqs, plan.shape.block, model.hidden_size
    return torch.zeros(*shape, dtype=dtype, device=model.device)
