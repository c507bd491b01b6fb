"""Block drafts that read masks after the text, as it stands: PARD and P-EAGLE.

PARD (arXiv 2504.18583) is a draft model that reads masks. P-EAGLE is an EAGLE-3 head that reads
them, with a learned hidden state before each. One causal forward runs the emitted tokens and the
masks after them. The last of these tokens, the root, proposes the first position, and each mask the
one after its own. The next step's emitted tokens overwrite the keys and values of masks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from dyntree_plugin.engine.drafts.block import BlockDraft
from dyntree_plugin.engine.drafts.draft_model import DraftModel, FilledRows, TreeSpeculator
from dyntree_plugin.engine.drafts.head import HeadSpeculator, joined
from dyntree_plugin.engine.step.catch_up import CatchUp, Masks, prompt_rows
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.tree.plan import TreePlan

Run = Callable[[FilledRows, torch.Tensor | None], torch.Tensor]
"""Runs rows with a head's input, or none; returns what gives their logits [N, V]."""

Combine = Callable[[torch.Tensor], torch.Tensor]
"""Turns the target's hidden states [N, layers * H] into a head's input [1 + N, H], of which the
first is that of masks."""


class MaskedText:
    """The `BlockReader` of a draft that reads masks.

    Its state between two calls lies at fixed addresses: the hidden states that give the logits.
    """

    def __init__(
        self,
        run: Run,
        logits: Callable[[torch.Tensor], torch.Tensor],
        speculator: DraftModelSpeculator,
        memory: RowMemory,
        writer: RowWriter,
        *,
        mask: int,
        hidden: torch.Tensor,
        of_head: tuple[Combine, torch.Tensor] | None = None,
    ) -> None:
        """``speculator``: vLLM's, which builds attention metadata for prompts. ``mask``: the token.
        ``hidden`` [R, length, L]: room for what gives the logits. ``of_head``: what makes a head's
        input, and room for it, [1 + R * E, H]; None for a draft model."""
        self._run_rows, self._logits = run, logits
        self._speculator = speculator
        self._memory = memory
        self._writer = writer
        self._hidden = hidden
        self._of_head = of_head
        self._masks = Masks(hidden.shape[1] - 1, mask)
        self.shift = memory.shift

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy the target's states before the emitted tokens: of the root and the accepted path."""
        if self._of_head is not None:
            combine, given = self._of_head
            before = target.rows_before(emitted.most).flatten()
            states = combine(joined(target, before))
            given[: len(states)].copy_(states)

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Run the emitted tokens and the masks; all requests decode."""
        memory, masks, most = self._memory, self._masks, emitted.most
        num_reqs, width = len(emitted.roots), most + masks.number
        step = torch.arange(width, device=memory.device)
        is_text = step < emitted.counts[:, None]
        tokens = pad(emitted.tokens[:, :most], (0, masks.number))
        tokens = tokens.masked_fill(~is_text, masks.token)
        counts = emitted.counts + masks.number
        rows = self._writer.chain(requests, Emitted(emitted.roots, tokens, counts, most=width))
        # The roots come before the masks. Padding requests may hold a count of another batch.
        final = (emitted.counts.long() - 1).clamp(min=0, max=most - 1)
        last, roots = memory.root_rows[:num_reqs], memory.root_positions[:num_reqs]
        torch.add(memory.starts(num_reqs, width)[:-1], final, out=last)
        torch.clamp(emitted.roots + 1 + final, max=memory.last_position, out=roots)
        states = None
        if self._of_head is not None:
            of_text = 1 + most * torch.arange(num_reqs, device=memory.device)[:, None] + step
            states = self._of_head[1].index_select(0, of_text.masked_fill(~is_text, 0).flatten())
        self._run(rows, states, last)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are run as well."""
        rows = prompt_rows(self._speculator, self._memory, step, self._masks)
        states = None
        if self._of_head is not None:
            states = self._of_head[0](joined(step.target, rows.read))
            states = torch.where(rows.masked[:, None], states[:1], states[1:])
        self._run(rows, states, rows.last)

    def offer(self, requests: int) -> tuple[torch.Tensor, ...]:
        """Return the logits of the positions after the roots."""
        return (self._logits(self._hidden[:requests].flatten(0, 1)),)

    def score(self, tokens: torch.Tensor | None, *offered: torch.Tensor) -> torch.Tensor:
        return offered[0]

    def _run(self, rows: FilledRows, states: torch.Tensor | None, last: torch.Tensor) -> None:
        """Run filled rows, of which ``last`` int64 [R] are the roots'."""
        hidden = self._run_rows(rows, states)
        length = self._hidden.shape[1]
        # At the end of the longest text there are fewer masks.
        at = last[:, None] + torch.arange(length, device=last.device)
        at = at.clamp(max=len(hidden) - 1).flatten()
        torch.index_select(hidden, 0, at, out=self._hidden[: len(last)].flatten(0, 1))


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
